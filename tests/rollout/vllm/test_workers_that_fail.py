"""Workers that crash, hang, babble or are orphaned: one clear error with their last words, and nothing left running."""

import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.rollout.vllm.benches import PATHS, closed

from gropius.errors import EngineError
from gropius.models.load import load_model
from gropius.models.tiny import TinyShape
from gropius.rollout import child
from gropius.rollout.vllm import program
from gropius.rollout.vllm.engine import VllmEngine, VllmOptions
from gropius.rollout.vllm.place import ProcessPlace
from gropius.rollout.vllm.wire import Wire, WireError

PREAMBLE = """
import json, os, socket, subprocess, sys, time
end = socket.socket(fileno=int(sys.argv[2]))
stream = end.makefile("rb")
def hear():
    return json.loads(stream.read(int.from_bytes(stream.read(4), "little")))
def say(op, **fields):
    body = json.dumps({"op": op, **fields}).encode()
    end.sendall(len(body).to_bytes(4, "little") + body)
def up():
    assert hear()["op"] == "start"
    say("ready", facts={"name": "stub"})
def up_with_weights():
    up()
    message = hear()
    say("done", call=message["call"], seconds=0.0)
    return hear()
"""


@functools.cache
def model():
    return load_model("tiny", tiny=TinyShape(hidden=16, layers=1, heads=2, kv_heads=1, mlp=16, context=32))


def engine_of(folder, body, **options):
    """An engine whose worker does what `body` says, and not a line of what it should."""
    file = folder / "worker.py"
    file.write_text(PREAMBLE + body)
    settings = VllmOptions(**{"start_timeout_s": 30.0, "hang_s": 30.0, **options})
    return VllmEngine(model(), settings, lambda: ProcessPlace(sys.executable, file), bound=1.0)


@pytest.fixture
def alive(monkeypatch):
    """The worker does not end by itself: no moment is given to it."""
    monkeypatch.setattr(child, "MOMENT_S", 0.0)


def gone(pid, within_s=5.0):
    """True when no such process runs (a zombie does not)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def fault_at_hand_over(folder, body, **options):
    engine = engine_of(folder, body, **options)
    pid = engine._link._place.process.pid
    with pytest.raises(EngineError) as caught:
        engine.set_policy(0, "")
    assert gone(pid)
    closed(engine)
    return str(caught.value)


def test_a_crash_at_the_start_is_told_with_exit_code_and_last_words(tmp_path):
    with pytest.raises(EngineError) as caught:
        engine_of(tmp_path, "print('one of many lines'); print('no device of this kind', file=sys.stderr); sys.exit(3)")
    assert "exit code 3" in str(caught.value) and "no device of this kind" in str(caught.value)


def test_a_start_that_takes_too_long_is_ended_with_all_it_started(tmp_path, alive):
    pids = tmp_path / "pids"
    body = (
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('compiling since an hour', flush=True)\ntime.sleep(600)"
    )
    with pytest.raises(EngineError, match=r"not ready after 3 s.*start_timeout_s") as caught:
        engine_of(tmp_path, body, start_timeout_s=3.0)
    assert "compiling since an hour" in str(caught.value)
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_failure_that_the_worker_tells_is_told(tmp_path, alive):
    with pytest.raises(EngineError, match="did not start: ValueError: no such dtype"):
        engine_of(tmp_path, "hear(); say('failed', error='ValueError: no such dtype'); time.sleep(600)")


def test_a_worker_that_hangs_is_given_up(tmp_path, alive):
    text = fault_at_hand_over(tmp_path, "up_with_weights(); print('thinking', flush=True); time.sleep(600)", hang_s=0.5)
    assert "hangs" in text and "hang_s" in text and "thinking" in text


def test_a_worker_that_says_it_lives_is_waited_for(tmp_path):
    body = "up_with_weights()\nfor _ in range(8):\n    time.sleep(0.2)\n    say('alive')\nsys.exit(7)"
    assert "exit code 7" in fault_at_hand_over(tmp_path, body, hang_s=1.0)


def test_a_worker_killed_by_a_signal_is_told(tmp_path):
    assert "SIGSEGV" in fault_at_hand_over(tmp_path, "up_with_weights(); os.kill(os.getpid(), 11)")


def test_what_is_no_message_ends_the_engine(tmp_path, alive):
    text = fault_at_hand_over(tmp_path, "up_with_weights(); end.sendall(b'\\x05\\0\\0\\0hello'); time.sleep(600)")
    assert "language" in text and "hello" in text


@pytest.mark.parametrize(
    "answer",
    [
        "ids=[99999], logprobs=[-1.0], drawn=[-1.0], reason='length'",
        "ids=[5, 6], logprobs=[-1.0], drawn=[-1.0], reason='length'",
        "ids=[5], logprobs=[-1.0], drawn=[-1.0], reason='bored'",
        "reason='length'",
    ],
)
def test_an_answer_that_cannot_be_true_ends_the_engine(tmp_path, alive, answer):
    stamps = "version=0, digest='', prompt_s=0.0, decode_s=0.0"
    body = f"m = up_with_weights(); say('drawn', key=m['key'], {answer}, {stamps}); time.sleep(600)"
    assert "cannot be understood" in fault_at_hand_over(tmp_path, body)


def test_a_worker_that_prints_without_end_is_not_blocked_and_its_last_lines_are_kept(tmp_path):
    body = "print('x' * 4_000_000); print('y\\n' * 100_000); print('the last line', flush=True); up(); sys.exit(1)"
    text = fault_at_hand_over(tmp_path, body)
    assert "the last line" in text and len(text) < 4000


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's end on Linux only")
def test_no_worker_outlives_a_trainer_that_is_killed():
    code = (
        "import sys, time; from pathlib import Path; from gropius.rollout.vllm.place import ProcessPlace\n"
        f"place = ProcessPlace(sys.executable, Path({program.__file__!r}))\n"
        "print(place.process.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | PATHS)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert not gone(pid, within_s=0.3)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(pid)


def wires():
    one, other = socket.socketpair()
    return Wire(one), Wire(other)


def test_messages_come_whole_and_in_order_with_their_files():
    here, there = wires()
    read, write = os.pipe()
    here.send({"op": "a", "text": "ü" * 10_000})
    here.send({"op": "b"}, file=write)
    here.send({"op": "c"})
    os.close(write)
    assert len(there.receive(5)[0]["text"]) == 10_000
    message, file = there.receive(5)
    assert message == {"op": "b"}
    os.write(file, b"through")
    assert os.read(read, 10) == b"through"
    assert there.receive(5) == ({"op": "c"}, None)
    with pytest.raises(TimeoutError):
        there.receive(0.01)
    here.close()
    assert there.receive(5) is None
    with pytest.raises(WireError):
        there.send({"op": "d"})
    os.close(read)
    os.close(file)


def test_what_is_not_finite_is_never_sent():
    here, _ = wires()
    with pytest.raises(ValueError):
        here.send({"op": "a", "x": float("nan")})


def test_an_absurd_size_is_refused_before_it_is_read():
    one, other = socket.socketpair()
    one.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(WireError, match="4294967295"):
        Wire(other).receive(5)
