# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in real processes: their order, their states, and every way in which they fail."""

import io
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from tests.agents.tool_files import GOOD
from tests.helpers.nightly import by_day
from verl.agents.interface import Observation, ToolCall
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig

NAMES = ("add", "wait", "relay", "fail", "Count")


@pytest.fixture
def tool_file(tmp_path):
    path = tmp_path / "tools.py"
    path.write_text(GOOD)
    return path


@pytest.fixture
def make_pool(tool_file):
    pools = []

    def make(**options):
        tools = tuple(f"{tool_file}:{name}" for name in NAMES)
        options = {"tool_timeout_s": 30.0, "tool_memory_limit_gb": 0.5} | options
        pools.append(ToolPool(MultiTurnConfig(enable=True, tools=tools, **options)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def wait_for(pool, count, timeout_s=60.0):
    found, end = [], time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} turns were answered"
        found += pool.ready(0.1)
    return found


def ask(pool, key, *calls):
    pool.submit(key, [ToolCall(name, arguments) for name, arguments in calls])
    ((answered, observations),) = wait_for(pool, 1)
    assert answered == key
    return observations


def count_of(observation):
    count, _, pid = observation.text.partition(" in ")
    return int(count), int(pid)


def is_alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def descendants(pid):
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(stat.parent.name))
    return [*children, *(each for child in children for each in descendants(child))]


def gone(pids, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_parallel_calls_run_at_once_and_keep_their_order(make_pool, tmp_path):
    pool = make_pool()
    pool.start("a", {})
    first, second, third = (str(tmp_path / name) for name in "abc")

    # Each waits for the one behind it: for ever, if they ran one after another.
    waits = [(second, first), (third, second), ("", third)]
    relays = [("relay", {"waits_for": file, "leaves": left}) for file, left in waits]
    observations = ask(pool, "a", *relays, ("add", {"a": 40, "b": 2}))

    assert [each.text for each in observations] == [first, second, third, "42"]
    assert not any(each.failed for each in observations)


def test_turns_are_returned_in_the_order_of_their_completion(make_pool, tmp_path):
    pool = make_pool()
    gates = {key: tmp_path / key for key in ("late", "early")}
    begin = time.monotonic()
    for key, gate in gates.items():
        pool.start(key, {})
        pool.submit(key, [ToolCall("relay", {"waits_for": str(gate)})])

    assert pool.ready(0.0) == []
    gates["early"].touch()
    [(early, [first])] = wait_for(pool, 1)
    time.sleep(0.3)
    gates["late"].touch()
    [(late, [last])] = wait_for(pool, 1)

    assert (early, late) == ("early", "late")
    assert 0 < first.seconds < last.seconds <= time.monotonic() - begin and last.seconds >= 0.3


def test_no_more_than_the_given_calls_run_at_once(make_pool):
    pool = make_pool(tool_concurrency=1)
    pool.start("a", {})
    begin = time.monotonic()

    ask(pool, "a", *[("wait", {"seconds": 0.3, "answer": ""})] * 2, ("count", {"seconds": 0.3}))

    assert time.monotonic() - begin >= 0.9


def test_a_state_belongs_to_one_conversation_and_lives_through_its_turns(make_pool):
    pool = make_pool(tool_kwargs={"count": {"step": 10}})
    for key, start in (("a", 0), ("b", 5)):
        pool.start(key, {"start": start})

    first = ask(pool, "a", ("count", {"seconds": 0.2}), ("count", {}))
    other = ask(pool, "b", ("count", {}))
    second = ask(pool, "a", ("count", {}))

    assert [count_of(each)[0] for each in (*first, *other, *second)] == [10, 20, 15, 30]
    assert len({count_of(each)[1] for each in (*first, *second)}) == 1
    assert count_of(other[0])[1] != count_of(first[0])[1]


REASONS = {
    "hang": r"fail did not answer within 4 s",
    "spin": r"fail did not answer within 4 s",
    "stop": r"fail did not answer within 4 s",
    "complain": r"fail failed: ValueError: bad day .* \(\d+ characters\) .*",
    "leave": r"fail exited with status 3",
    "crash": r"fail was killed by SIGSEGV",
    "exit_politely": r"fail failed: SystemExit: bye",
    "fill_memory": r"fail failed: it needs more than the 0.5 GiB of memory that it may use",
    "large_image": r"fail returned an image of 10000 x 10000 pixels, at most 67108864 pixels",
    "number_of_images": r"fail returned more than 16 images",
    "thing": r"fail returned object, not text, an image, JSON values or an Observation .*",
    "garbage": r"fail sent a message that cannot be read .*",
    "kill_guardian": r"fail was killed by SIGKILL.*",
    "missing": r"fail failed: KeyError: 'missing'",
}


def test_every_failure_costs_its_own_call_only(make_pool):
    pool = make_pool(tool_timeout_s=4.0, tool_concurrency=4)
    pool.start("a", {})
    ask(pool, "a", ("count", {}))

    failed = ask(pool, "a", *[("fail", {"kind": kind}) for kind in REASONS])
    (counted, added) = ask(pool, "a", ("count", {}), ("add", {"a": 1}))

    for observation, (kind, reason) in zip(failed, REASONS.items(), strict=True):
        assert observation.failed, kind
        assert re.fullmatch(reason, observation.text), f"{kind}: {observation.text}"
        assert len(observation.text) < 1200
    assert (count_of(counted)[0], added.text) == (2, "2")
    for observation, reason in zip([*failed, counted, added], [*REASONS.values(), "", ""], strict=True):
        assert observation.seconds >= (4.0 if "did not answer" in reason else 0.0)


@pytest.mark.parametrize("kind", by_day(["hang", "leave", "kill_guardian"], "leave", "kill_guardian"))
def test_a_process_that_is_lost_takes_the_state_of_its_conversation_only(make_pool, kind):
    pool = make_pool(tool_timeout_s=3.0 if kind == "hang" else 30.0)
    for key in "ab":
        pool.start(key, {"start": 10})
    before = {key: count_of(ask(pool, key, ("count", {}))[0]) for key in "ab"}

    (lost,) = ask(pool, "a", ("count", {"kind": kind}))
    after = {key: count_of(ask(pool, key, ("count", {}))[0]) for key in "ab"}

    assert lost.failed
    assert "its state is lost, a further call begins with a new one" in lost.text
    assert after["b"] == (12, before["b"][1])
    assert after["a"][0] == 11
    assert after["a"][1] != before["a"][1]
    assert gone([before["a"][1]])


def test_an_error_keeps_the_state(make_pool):
    pool = make_pool()
    pool.start("a", {})
    before = count_of(ask(pool, "a", ("count", {}))[0])

    (failed,) = ask(pool, "a", ("count", {"kind": "complain"}))

    assert failed.failed
    assert count_of(ask(pool, "a", ("count", {}))[0]) == (3, before[1])


def test_a_state_that_cannot_be_made_is_a_failed_call(make_pool):
    pool = make_pool()
    pool.start("a", {"refuse": True})

    observations = ask(pool, "a", ("count", {}), ("count", {}))

    assert [each.text for each in observations] == ["count failed: KeyError: 'no such row'"] * 2


def test_a_call_that_cannot_travel_is_answered_and_the_next_ones_are_made(make_pool):
    pool = make_pool()
    pool.start("a", {})
    pool.start("b", {})

    (failed,) = ask(pool, "a", ("count", {"kind": lambda: None}))

    assert failed.failed and failed.done and "could not be made" in failed.text
    assert count_of(ask(pool, "a", ("count", {}))[0])[0] == 1
    assert ask(pool, "b", ("add", {"a": 1, "b": 2}))[0].text == "3"


def test_a_call_of_no_tool_is_refused_before_it_is_queued(make_pool):
    pool = make_pool()
    pool.start("a", {})

    with pytest.raises(KeyError, match="ad"):
        pool.submit("a", [ToolCall("ad", {"a": 1})])


@pytest.mark.parametrize(
    ("side", "start", "stop"), [("left", "\n[...", "z"), ("middle", "a", "z"), ("right", "a", "...]\n")]
)
def test_a_long_answer_is_cut_before_it_travels(make_pool, side, start, stop):
    pool = make_pool(tool_response_truncate_side=side, max_tool_response_length=1000)
    pool.start("a", {})

    (observation,) = ask(pool, "a", ("fail", {"kind": "long"}))

    assert len(observation.text) < 33_000
    assert (observation.text[: len(start)], observation.text[-len(stop) :]) == (start, stop)
    assert "[... 9968006 characters ...]" in observation.text
    assert not observation.failed


def test_a_process_that_was_killed_between_calls_is_replaced(make_pool):
    pool = make_pool()
    pool.start("a", {})
    ask(pool, "a", ("add", {"a": 1}))
    (_, pid) = count_of(ask(pool, "a", ("count", {}))[0])
    (host,) = [each for each in descendants(os.getpid()) if pid in descendants(each)][1:2]
    idle = [each for each in descendants(host) if each != pid and not descendants(each)]

    for each in idle:
        os.kill(each, 9)
    assert gone(idle)

    assert ask(pool, "a", ("add", {"a": 1}))[0].text == "2"


def test_the_pool_outlives_the_process_that_all_tools_have_in_common(make_pool):
    pool = make_pool()
    pool.start("a", {})
    (_, pid) = count_of(ask(pool, "a", ("count", {}))[0])
    chain = [each for each in descendants(os.getpid()) if pid in descendants(each)]

    os.kill(chain[0], 9)
    assert gone([*chain, pid])

    (lost,) = ask(pool, "a", ("count", {}))
    assert "its state is lost" in lost.text
    assert count_of(ask(pool, "a", ("count", {}))[0])[0] == 1


def test_the_end_of_a_conversation_closes_its_state_and_ends_its_processes(make_pool, tmp_path):
    pool, log = make_pool(), tmp_path / "log"
    pool.start("a", {"log": str(log)})
    (_, pid) = count_of(ask(pool, "a", ("count", {}))[0])

    pool.end("a")

    assert gone([pid])
    assert log.read_text() == "closed at 1\n"


def test_open_calls_of_an_ended_conversation_are_dropped(make_pool):
    pool = make_pool()
    for key in ("a", "b"):
        pool.start(key, {})
    pool.submit(
        "a", [ToolCall("wait", {"seconds": 0.3, "answer": "late"}), ToolCall("count", {"seconds": 9})]
    )
    time.sleep(0.1)
    pool.end("a")
    pool.start("a", {})

    assert [each.text for each in ask(pool, "a", ("wait", {"seconds": 0.5, "answer": "new"}))] == ["new"]
    assert pool.ready(0.3) == []


@pytest.mark.nightly
def test_a_daemon_of_a_call_that_hangs_is_ended_with_it(make_pool, tool_file):
    pool = make_pool(tool_timeout_s=3.0)
    pool.start("a", {})

    ask(pool, "a", ("fail", {"kind": "leave_a_daemon"}))

    assert gone([int(Path(f"{tool_file}.pid").read_text())])


def test_closing_the_pool_kills_every_process(make_pool):
    others = set(descendants(os.getpid()))
    pool = make_pool()
    pool.start("a", {})
    ask(pool, "a", ("count", {}), ("add", {"a": 1}))
    pool.submit("a", [ToolCall("fail", {"kind": "hang"}), ToolCall("fail", {"kind": "spin"})])
    pids, end = [], time.monotonic() + 60
    while len(pids) < 10:  # two for the host, and two for each of four tools' processes
        assert time.monotonic() < end, f"{len(pids)} processes were started"
        pids = [pid for pid in descendants(os.getpid()) if pid not in others]

    pool.close()
    pool.close()

    assert gone(pids)
    for use in (lambda: pool.start("b", {}) or pool.submit("b", []), lambda: pool.ready(1.0)):
        with pytest.raises(RuntimeError, match="the pool of tools was closed"):
            use()


@pytest.mark.nightly
def test_hundreds_of_conversations_have_a_state_each(make_pool, tmp_path):
    pool, log = make_pool(), tmp_path / "log"
    before = len(os.listdir("/proc/self/fd"))
    for key in range(200):
        pool.start(key, {"start": key, "log": str(log)})
        pool.submit(key, [ToolCall("count", {}), ToolCall("count", {})])
    first = wait_for(pool, 200, timeout_s=300.0)
    for key in range(200):
        pool.submit(key, [ToolCall("count", {})])
    second = wait_for(pool, 200, timeout_s=300.0)

    assert {key: count_of(each[-1])[0] for key, each in first} == {key: key + 2 for key in range(200)}
    assert {key: count_of(each[-1])[0] for key, each in second} == {key: key + 3 for key in range(200)}
    for key in range(200):
        pool.end(key)
    assert gone([count_of(each[0])[1] for _, each in second])
    end = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < end:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert log.read_text().count("closed at") == 200


@pytest.mark.nightly
@pytest.mark.parametrize("has_turn", [False, True])
def test_only_a_turn_of_the_policy_gives_an_agent_time_again(tmp_path, has_turn):
    path = tmp_path / "agent.py"
    path.write_text("import time\ndef run(row, policy):\n    time.sleep(3)\n    return 1.0")
    options = MultiTurnConfig(enable=True, agent=f"{path}:run", tool_timeout_s=1.5)
    with ToolPool(options) as pool:
        pool.start("a", {})
        pool.submit("a", [ToolCall("agent", {"base_url": "", "api_key": "", "model": ""})])
        found = []
        while not found:
            found = pool.ready(0.05)
            if not found:
                pool.hold("a")  # a call that is refused or answered
                pool.release("a", has_turn=has_turn)

    ((_, [result]),) = found
    assert result.failed != has_turn, result.text
    if not has_turn:
        assert result.text == "agent neither returned nor had a turn of the policy within 1.5 s"


def test_an_image_arrives_as_png(make_pool, tool_file):
    tool_file.write_text(
        GOOD + "def red():\n    from PIL import Image\n    return ['red:', Image.new('RGB', (3, 2), 'red')]\n"
    )
    pool = make_pool()
    pool.start("a", {})

    (observation,) = ask(pool, "a", ("fail", {"kind": "red"}))

    (reference,) = observation.images
    with Image.open(io.BytesIO(reference["bytes"])) as image:
        assert (image.format, image.size, image.getpixel((0, 0))) == ("PNG", (3, 2), (255, 0, 0))
    assert observation.text == "red:"


OWN_CLASS = """
from collections import OrderedDict
from dataclasses import dataclass
from verl.agents.interface import Observation

class Text(str):
    def __str__(self):
        return self

class Content(bytes):
    def __bytes__(self):
        return self

@dataclass(frozen=True)
class Own(Observation):
    more: object = None

def own():
    frame = Content(b"frames")
    return Own(Text("text"), videos=[OrderedDict(bytes=frame), Text(__file__)], reward=True, more=OrderedDict)
"""


def test_an_answer_arrives_as_plain_values_whatever_class_the_tool_made_it_of(make_pool, tool_file):
    tool_file.write_text(GOOD + OWN_CLASS)
    pool = make_pool()
    pool.start("a", {})

    (observation,) = ask(pool, "a", ("fail", {"kind": "own"}))

    plain = Observation(
        "text", images=[], videos=[{"bytes": b"frames"}, {"path": str(tool_file)}], reward=1.0, seconds=1.0
    )
    assert type(observation) is Observation and observation == plain, observation.text
    of_plain = {name: type(value) for name, value in vars(plain).items()}
    assert {name: type(value) for name, value in vars(observation).items()} == of_plain
    payloads = [value for video in observation.videos for value in video.values()]
    assert [type(value) for value in (*payloads, observation.text)] == [bytes, str, str]


def test_a_file_that_cannot_be_imported_is_named(make_pool, tool_file):
    tool_file.write_text("import no_such_module")

    with pytest.raises(ValueError, match=rf"{tool_file} failed: ModuleNotFoundError.*no_such_module"):
        make_pool()


def test_a_class_that_cannot_be_made_is_named(make_pool, tool_file):
    tool_file.write_text(GOOD.replace("self.step = step", "self.step = 1 / step"))

    with pytest.raises(ValueError, match=r"making the tool of .*tools.py failed: ZeroDivisionError"):
        make_pool(tool_kwargs={"count": {"step": 0}})


LATE = """
import sys
import openai


def run(row, policy):
    loaded = set(sys.modules)
    openai.OpenAI().chat.completions
    return float(len(set(sys.modules) - loaded))
"""


def test_an_agents_process_imports_nothing_when_it_first_asks_the_policy(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(LATE)
    with ToolPool(MultiTurnConfig(enable=True, agent=f"{path}:run")) as pool:
        pool.start("a", {})
        address = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "model": "m"}
        pool.submit("a", [ToolCall("agent", address)])
        found = []
        while not found:
            found = pool.ready(60.0)

    ((_, [result]),) = found
    assert not result.failed and result.reward == 0.0, result


def test_a_warning_says_that_the_agent_failed(tmp_path, caplog):
    path = tmp_path / "agent.py"
    path.write_text("def run(row, policy):\n    return row['question']")
    with ToolPool(MultiTurnConfig(enable=True, agent=f"{path}:run")) as pool:
        pool.start("a", {})
        pool.submit("a", [ToolCall("agent", {"base_url": "", "api_key": "", "model": ""})])
        while not pool.ready(60.0):
            pass

    assert "the agent failed: `agent` raised KeyError: 'question'" in caplog.text
