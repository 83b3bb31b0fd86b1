#include "cpu/graph.h"

#include <pthread.h>
#include <torch/csrc/stable/library.h>

#include <map>
#include <mutex>

namespace dflash::cpu {
namespace {

constexpr const char* kReplay = "dflash::graph_replay";

// By handle. Leaked at exit on purpose: tensors must not outlive libtorch.
struct Graphs {
  std::mutex lock;
  std::map<int64_t, std::shared_ptr<Graph>> graphs;
  int64_t last = 0;
};

Graphs& the_graphs();

void before_fork() {
  the_graphs().lock.lock();
}

void after_fork() {
  the_graphs().lock.unlock();
}

// A forked child has the thread that forked and no other: what those ran is not running there.
void after_fork_in_child() {
  for (auto& [handle, graph] : the_graphs().graphs) graph->running.store(false);
  after_fork();
}

Graphs& the_graphs() {
  static Graphs* const graphs = [] {
    auto* const made = new Graphs;
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    return made;
  }();
  return *graphs;
}

void graph_begin() {
  STD_TORCH_CHECK(!recording, "dflash::graph_begin: a graph is being recorded on this thread");
  recording = new Graph;
}

int64_t graph_end() {
  STD_TORCH_CHECK(recording, "dflash::graph_end: no graph is being recorded on this thread");
  std::shared_ptr<Graph> graph(std::exchange(recording, nullptr));
  Graphs& all = the_graphs();
  const std::lock_guard hold(all.lock);
  all.graphs.emplace(++all.last, std::move(graph));
  return all.last;
}

std::shared_ptr<Graph> find(const char* op, int64_t handle) {
  Graphs& all = the_graphs();
  const std::lock_guard hold(all.lock);
  const auto found = all.graphs.find(handle);
  STD_TORCH_CHECK(found != all.graphs.end(), op, ": handle must be one of graph_end that was not ",
                  "freed, got ", handle);
  return found->second;
}

void graph_replay(int64_t handle) {
  STD_TORCH_CHECK(!recording, kReplay, ": a graph is being recorded on this thread");
  const std::shared_ptr<Graph> graph = find(kReplay, handle);
  STD_TORCH_CHECK(!graph->running.exchange(true, std::memory_order_acquire), kReplay,
                  ": handle must not be replayed by two threads at once, got ", handle);
  const std::unique_ptr<Graph, void (*)(Graph*)> done(
      graph.get(), [](Graph* g) { g->running.store(false, std::memory_order_release); });
  for (const auto& call : graph->calls) call->run();
}

int64_t graph_bytes(int64_t handle) {
  int64_t bytes = 0;
  for (const auto& call : find("dflash::graph_bytes", handle)->calls)
    for (const Tensor& t : call->made.tensors) bytes += t.numel() * int64_t(t.element_size());
  return bytes;
}

void graph_free(int64_t handle) {
  find("dflash::graph_free", handle);
  Graphs& all = the_graphs();
  const std::lock_guard hold(all.lock);
  all.graphs.erase(handle);
}

}  // namespace

// A result from anywhere else would be another tensor at every run, and its readers would not know.
void check_recorded(const Allocations& made, const Tensor& result) {
  bool known = result.numel() == 0;
  for (const Tensor& t : made.tensors) known |= t.const_data_ptr() == result.const_data_ptr();
  STD_TORCH_CHECK(known, "dflash: an operator's result must come from new_empty to be recorded");
}

STABLE_TORCH_LIBRARY_IMPL(dflash, CompositeExplicitAutograd, m) {
  m.impl("graph_begin", TORCH_BOX(&graph_begin));
  m.impl("graph_end", TORCH_BOX(&graph_end));
  m.impl("graph_replay", TORCH_BOX(&graph_replay));
  m.impl("graph_bytes", TORCH_BOX(&graph_bytes));
  m.impl("graph_free", TORCH_BOX(&graph_free));
}

}  // namespace dflash::cpu
