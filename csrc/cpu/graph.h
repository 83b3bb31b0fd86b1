// A step as a graph: operator calls recorded once and run again on the same tensors, without Python
// and the dispatcher between them. What cudaGraph is to a GPU; the rules are the same: shapes and
// addresses stay, values may change, and every result is overwritten by the next run.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "host/alloc.h"

namespace dflash::cpu {

using torch::stable::Tensor;

struct GraphCall {
  Allocations made;  // the tensors of this call, its results among them
  virtual ~GraphCall() = default;
  virtual void run() = 0;
};

struct Graph {
  std::vector<std::unique_ptr<GraphCall>> calls;
  std::atomic<bool> running{false};  // two replays at once would hand out the wrong tensors
};

inline thread_local Graph* recording = nullptr;

// Everything the call made comes from the recorded tensors while this lives.
class UseAllocations {
 public:
  explicit UseAllocations(Allocations* use) : before_(std::exchange(allocations, use)) {}
  ~UseAllocations() { allocations = before_; }
  UseAllocations(const UseAllocations&) = delete;
  UseAllocations& operator=(const UseAllocations&) = delete;

 private:
  Allocations* before_;
};

void check_recorded(const Allocations& made, const Tensor& result);

// An operator that a graph can record: register TORCH_BOX(&Recorded<&op>::call) for op.
template <auto kOp>
struct Recorded;

template <class R, class... A, R (*kOp)(A...)>
struct Recorded<kOp> {
  struct Call final : GraphCall {
    std::tuple<std::decay_t<A>...> args;
    explicit Call(const std::decay_t<A>&... a) : args(a...) {}
    void run() override {
      made.next = 0;
      const UseAllocations use(&made);
      std::apply(kOp, args);
    }
  };

  static R call(A... args) {
    if (!recording) return kOp(std::forward<A>(args)...);
    auto made = std::make_unique<Call>(args...);
    Graph* graph = std::exchange(recording, nullptr);  // what an operator calls is part of it
    const std::unique_ptr<Graph*, void (*)(Graph**)> restore(&graph,
                                                             [](Graph** g) { recording = *g; });
    const UseAllocations use(&made->made);
    const auto keep = [&] {
      made->made.recorded = true;
      graph->calls.push_back(std::move(made));
    };
    if constexpr (std::is_void_v<R>) {
      kOp(std::forward<A>(args)...);
      keep();
    } else {
      R result = kOp(std::forward<A>(args)...);
      check(made->made, result);
      keep();
      return result;
    }
  }

 private:
  static void check(const Allocations& made, const Tensor& result) { check_recorded(made, result); }
  template <class... T>
  static void check(const Allocations& made, const std::tuple<T...>& results) {
    std::apply([&](const auto&... result) { (check(made, result), ...); }, results);
  }
};

}  // namespace dflash::cpu
