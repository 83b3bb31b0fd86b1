"""A forked child has none of its parent's threads: it works with its own, or says why not.

Torch's OpenMP hangs in such a child at its next large copy or fill; our operators do not use it.
"""

import subprocess
import sys
import textwrap

import pytest

from torch_dflash.testing.tiny import tiny_drafter, tiny_hybrid

HEAD = """
    import logging, os, sys, threading, time
    import torch
    from torch_dflash import Session, load_drafter, load_target, ops

    os.chdir(sys.argv[1])
    torch.set_num_threads(3)
    logging.disable()

    def child(run):
        '''Exit status of a child that runs this; one that hangs is ended and counts as 99.'''
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if run() else 2
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            os._exit(status)
        until = time.monotonic() + 15
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return 99
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fork")
    tiny_hybrid(folder / "target.gguf", seed=1, layers=3)
    tiny_drafter(folder / "drafter", "dspark", num_target_layers=3, target_layer_ids=(0, 1))
    return folder


def run(files, code):
    quiet = "ignore::DeprecationWarning"  # of forking beside threads
    code = textwrap.dedent(HEAD) + textwrap.dedent(code)
    command = [sys.executable, "-W", quiet, "-c", code, str(files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_child_decodes_on_one_thread_and_refuses_more(files):
    out = run(files, """
        target = load_target("target.gguf")
        drafter = load_drafter("drafter", target)
        session = Session(target, drafter)
        first = session.generate([5, 17, 300, 2], 24).tokens
        more = session.generate([5, 17, 300, 2] + first, 24).tokens  # extends: the state is there
        session.reset()
        session.generate([5, 17, 300, 2], 24)

        def same():
            torch.set_num_threads(1)
            return session.generate([5, 17, 300, 2] + first, 24).tokens == more

        def refused():
            try:
                Session(target)
            except RuntimeError as error:
                return "torch must have 1 thread, got 3, which would hang; call" in str(error)

        print(child(refused), child(same), child(lambda: child(same) == 0), same())
    """)  # fmt: skip
    assert out == "0 0 0 True\n"


def test_operators_in_a_child_have_threads_of_their_own(files):
    out = run(files, """
        packed = ops.quantize(torch.randn(4096, 512), 12)
        x = ops.quant_act(torch.randn(3, 512), 1)
        weight = ops.repack(packed, 12, 512)
        expected = ops.qmm(x, weight, [12], [4096], 512)

        def same():
            return torch.equal(ops.qmm(x, weight, [12], [4096], 512), expected)

        print([child(same) for _ in range(5)], child(lambda: child(same) == 0), same())
    """)  # fmt: skip
    assert out == "[0, 0, 0, 0, 0] 0 True\n"


def test_forks_beside_running_threads(files):
    """Whatever the other thread holds at that moment: the pool, a lock, a graph in its middle."""
    out = run(files, """
        target = load_target("target.gguf")
        drafter = load_drafter("drafter", target)
        session, prompt = Session(target, drafter), [5, 17, 300, 2]
        expected = session.generate(prompt, 16).tokens
        session.generate(prompt + expected[:8], 16)
        stop, runs = threading.Event(), [0]

        def busy():
            while not stop.is_set():
                assert session.generate(prompt, 16).tokens == expected
                runs[0] += 1

        def fresh():
            torch.set_num_threads(1)
            # of the thread's session, and of one of its own on the same models
            longer = session.generate(prompt + expected[:4], 8).tokens
            return longer == expected[4:12] and (
                Session(target, drafter).generate(prompt, 16).tokens == expected)

        thread = threading.Thread(target=busy)
        thread.start()
        found = []
        for n in range(10):
            time.sleep(0.003 * (n % 5))
            found.append(child(fresh))
        stop.set()
        thread.join()
        print(found == [0] * 10 or found, runs[0] > 5)
    """)  # fmt: skip
    assert out == "True True\n"


def test_a_graph_that_ran_elsewhere_does_not_run_in_a_child(files):
    out = run(files, """
        x, w = torch.randn(512, 8192), torch.ones(8192)
        residual = torch.zeros_like(x)
        ops.graph_begin()
        ops.add_rms_norm(x, residual, w, 1e-6, False, 0)
        handle = ops.graph_end()
        stop = threading.Event()

        def busy():
            while not stop.is_set():
                ops.graph_replay(handle)

        thread = threading.Thread(target=busy)
        thread.start()
        found = [child(lambda: ops.graph_replay(handle) is None) for _ in range(20)]
        stop.set()
        thread.join()
        print(found == [0] * 20 or found)
    """)  # fmt: skip
    assert out == "True\n"
