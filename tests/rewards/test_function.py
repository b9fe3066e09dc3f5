# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import numpy as np
import pytest

from verl.rewards.function import load_reward_function

ROWS = [
    {"prompt": "2 + 2?", "response": "four", "ground_truth": "4", "source": "a"},
    {"prompt": "3 + 3?", "response": "6", "ground_truth": "6"},
]


def test_the_function_is_main_when_none_is_named(reward_file):
    path = reward_file("def main(inputs): return [{'overall': 1.0} for _ in inputs]")

    reward = load_reward_function(path)

    assert (reward.function_name, reward.reward_type, reward.name) == ("main", "batch", "reward")
    assert reward.score(ROWS) == [{"overall": 1.0}, {"overall": 1.0}]


def test_a_file_without_main_but_with_compute_score_gets_the_suggestion(reward_file):
    path = reward_file("def compute_score(inputs): ...")

    with pytest.raises(ValueError, match=rf"`main` is missing in {path}: write {path}:compute_score"):
        load_reward_function(path)


def test_a_mistyped_function_gets_the_nearest_one(reward_file):
    path = reward_file("def judge_answers(inputs): ...\ndef other(inputs): ...")

    with pytest.raises(ValueError, match=f"write {path}:judge_answers"):
        load_reward_function(f"{path}:judge_answer")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"`worker.reward.reward_function`: no file {tmp_path}/none.py"
    ):
        load_reward_function(f"{tmp_path}/none.py:main")


def test_a_file_that_raises_on_import_is_an_error_with_its_line(reward_file):
    path = reward_file("import os\nimport no_such_package\n")

    with pytest.raises(ValueError, match=rf"importing {path} failed: ModuleNotFoundError: .* at {path}:2"):
        load_reward_function(path)


def test_a_file_that_exits_on_import_is_an_error(reward_file):
    with pytest.raises(ValueError, match=r"failed: SystemExit: 3 at .*:2"):
        load_reward_function(reward_file("import sys\nsys.exit(3)\n"))


def test_a_syntax_error_is_an_error_with_its_line(reward_file):
    path = reward_file("x = 1\ndef main(:\n")

    with pytest.raises(ValueError, match=rf"SyntaxError: .* at {path}:2"):
        load_reward_function(path)


def test_an_unknown_reward_type_is_rejected(reward_file):
    with pytest.raises(ValueError, match=r"`REWARD_TYPE` must be one of .*'sequential'.*, got 'single'"):
        load_reward_function(reward_file("REWARD_TYPE = 'single'\ndef main(x): ..."))


def test_the_config_names_the_type_of_a_file_that_does_not(reward_file):
    path = reward_file("def main(row): return {'overall': 1}")

    assert load_reward_function(path, {}, "sequential").score(ROWS[:1]) == [{"overall": 1.0}]


def test_an_async_function_cannot_take_columns(reward_file):
    path = reward_file('REWARD_TYPE = "dataproto"\nasync def main(data): ...')

    with pytest.raises(ValueError, match='set REWARD_TYPE = "sequential" or "batch"'):
        load_reward_function(path)


def test_an_async_function_may_take_all_responses_at_once(reward_file):
    path = reward_file(
        """
        import asyncio
        async def main(rows):
            await asyncio.sleep(0)
            return [{"overall": len(rows)} for _ in rows]
        """
    )

    assert load_reward_function(path).score(ROWS) == [{"overall": 2.0}] * 2


HIDDEN = """
import asyncio, concurrent.futures, functools
def in_thread(function, *args):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return pool.submit(lambda: asyncio.run(function(*args))).result()
def decorator(function):
    {wraps}
    def wrapper(*args):
        return {call}
    return wrapper
@decorator
async def main(given):
    await asyncio.sleep(0)
    return {returned}
"""
CALLS = {"wraps": "@functools.wraps(function)", "returned": "[{'overall': 1} for _ in given]"}


@pytest.mark.parametrize("call", ["function(*args)", "in_thread(function, *args)"])
@pytest.mark.parametrize(
    ("kind", "returned"), [("batch", CALLS["returned"]), ("sequential", "{'overall': 1}")]
)
def test_a_decorated_async_function_is_awaited_if_its_decorator_does_not(reward_file, call, kind, returned):
    text = HIDDEN.format(**CALLS | {"call": call, "returned": returned})

    assert load_reward_function(reward_file(text), {}, kind).score(ROWS) == [{"overall": 1.0}] * 2


@pytest.mark.parametrize("kind", ["batch", "sequential", "dataproto"])
def test_an_async_function_that_its_decorator_hides_is_an_error_with_the_remedy(reward_file, kind):
    text = HIDDEN.format(**CALLS | {"call": "function(*args)", "wraps": ""})

    with pytest.raises(ValueError, match=r"returned a coroutine: .* add functools\.wraps"):
        load_reward_function(reward_file(text), {}, kind).score(ROWS)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"weight": 1, "scale": 2},
            "`worker.reward.reward_function_kwargs` .*{path}:1 `main`: got an unexpected keyword argument"
            " 'scale'; it accepts .'weight'.",
        ),
        (
            {},
            r"{path}:1 `main\(inputs, weight\)` must take one argument \(missing .*: 'weight'\)",
        ),
    ],
)
def test_kwargs_that_do_not_fit_are_rejected_at_load(reward_file, kwargs, message):
    path = reward_file("def main(inputs, weight): ...")

    with pytest.raises(ValueError, match=message.format(path=path)):
        load_reward_function(path, kwargs)


def test_kwargs_reach_the_function(reward_file):
    path = reward_file("def main(inputs, weight): return [{'overall': weight} for _ in inputs]")

    assert load_reward_function(path, {"weight": 0.25}).score(ROWS) == [{"overall": 0.25}] * 2


def test_a_sequential_function_sees_one_row_with_all_its_columns(reward_file):
    path = reward_file(
        """
        REWARD_TYPE = "sequential"
        def main(row):
            return {"overall": row["response"] == row["ground_truth"], "columns": len(row)}
        """
    )

    assert load_reward_function(path).score(ROWS) == [
        {"overall": 0.0, "columns": 4.0},
        {"overall": 1.0, "columns": 3.0},
    ]


def test_an_async_function_works_in_this_process_too(reward_file):
    path = reward_file(
        """
        import asyncio
        REWARD_TYPE = "sequential"
        async def main(row):
            await asyncio.sleep(0)
            return {"overall": len(row["response"])}
        """
    )

    assert load_reward_function(path).score(ROWS) == [{"overall": 4.0}, {"overall": 1.0}]


def test_a_dataproto_function_sees_columns_and_may_return_tensors(reward_file):
    path = reward_file(
        """
        import torch
        REWARD_TYPE = "dataproto"
        def main(data):
            assert data.prompts == ["2 + 2?", "3 + 3?"] and data.source == ["a", None] and len(data) == 2
            right = [float(r == g) for r, g in zip(data.responses, data.ground_truth)]
            return {"reward": torch.tensor(right), "length": [len(r) for r in data.responses]}
        """
    )

    assert load_reward_function(path).score(ROWS) == [
        {"overall": 0.0, "length": 4.0},
        {"overall": 1.0, "length": 1.0},
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("{'reward': [1.0]}", "`reward` must hold 2 values|`overall` must hold 2 values"),
        ("{'score': [1.0, 1.0]}", r"must return a dict with `reward` for all responses, got \['score'\]"),
        ("[1.0, 1.0]", "must return a dict with `reward` for all responses, got list"),
        ("{'reward': 1.0}", "must hold 2 values, one per response, got float"),
    ],
)
def test_a_dataproto_function_must_return_a_value_for_each_response(reward_file, returned, message):
    path = reward_file(f"REWARD_TYPE = 'dataproto'\ndef main(data): return {returned}")

    with pytest.raises(ValueError, match=message):
        load_reward_function(path).score(ROWS)


def test_scalars_of_numpy_and_torch_are_numbers(reward_file):
    path = reward_file(
        """
        import numpy, torch
        def main(inputs):
            return [{"overall": numpy.float32(0.5), "b": numpy.bool_(True), "t": torch.tensor(2), "i": 3}]
        """
    )

    assert load_reward_function(path).score(ROWS[:1]) == [{"overall": 0.5, "b": 1.0, "t": 2.0, "i": 3.0}]


def test_numbers_and_truth_values_of_any_library_are_numbers(reward_file):
    path = reward_file(
        """
        import decimal, fractions, sympy
        def main(inputs):
            return [{"overall": decimal.Decimal("0.5"), "a": sympy.true, "b": sympy.Rational(1, 4),
                     "c": sympy.false, "d": fractions.Fraction(1, 8)}]
        """
    )

    [scores] = load_reward_function(path).score(ROWS[:1])

    assert scores == {"overall": 0.5, "a": 1.0, "b": 0.25, "c": 0.0, "d": 0.125}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            "{'accuracy': 1.0}",
            r"must return a dict with `overall` for each response, got the keys \['accuracy'\]",
        ),
        ("float('nan')", "`overall` must be a finite number, got nan"),
        ("'0.5'", "must return a dict with `overall` for each response, got str '0.5'"),
        ("None", "must return a dict with `overall` for each response, got NoneType None"),
        ("{'overall': float('nan')}", "`overall` must be a finite number, got nan"),
        ("{'overall': 1.0, 'x': float('inf')}", "`x` must be a finite number, got inf"),
        ("{'overall': '1.0'}", "`overall` must be a finite number, got '1.0'"),
        (
            "{'overall': 1e39}",
            r"`overall` must be a finite number of at most 3.403e\+38, as in float32, got 1e",
        ),
        ("{'overall': 10**400}", "`overall` must be a finite number, got 1000"),
        ("{'overall': __import__('sympy').Symbol('x') > 1}", "`overall` must be a finite number, got x > 1"),
        ("{'overall': [1.0]}", "`overall` must be a finite number"),
    ],
)
def test_a_wrong_score_is_an_error_that_names_the_row_and_shows_the_response(reward_file, second, message):
    path = reward_file(f"def main(inputs): return [{{'overall': 1.0}}, {second}]")

    with pytest.raises(ValueError, match=rf"(?s){path}:main.*{message}.* for row 1\b.*response: '6'"):
        load_reward_function(path).score(ROWS)


@pytest.mark.parametrize("returned", ["[{'overall': 1.0}]", "{'overall': 1.0}", "None"])
def test_a_batch_function_must_return_one_result_for_each_response(reward_file, returned):
    with pytest.raises(ValueError, match="must return a list of 2 dicts, one per response"):
        load_reward_function(reward_file(f"def main(inputs): return {returned}")).score(ROWS)


def test_long_responses_are_shortened_in_errors(reward_file):
    path = reward_file("REWARD_TYPE = 'sequential'\ndef main(row): return {}")
    row = {"response": "a" * 5000 + "the end"}

    with pytest.raises(ValueError, match=r"the end'") as caught:
        load_reward_function(path).score([row])

    assert len(str(caught.value)) < 1000


def test_what_the_function_raises_comes_out_as_it_is_in_this_process(reward_file):
    path = reward_file("def main(inputs): return 1 / 0")

    with pytest.raises(ZeroDivisionError):
        load_reward_function(path).score(ROWS)


def test_loading_and_scoring_import_neither_torch_nor_ray_nor_what_reads_configs(reward_file):
    path = reward_file("def main(inputs): return [{'overall': 1.0} for _ in inputs]")
    code = (
        "import sys; from verl.rewards import worker_process; from verl.rewards.function import *;"
        f"load_reward_function({path!r}).score([{{}}]);"
        "print({'torch', 'ray', 'numpy', 'omegaconf', 'yaml'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()", done.stdout


def test_object_arrays_of_the_loader_are_ordinary_values(reward_file):
    path = reward_file("def main(inputs): return [{'overall': sum(row['costs'])} for row in inputs]")

    assert load_reward_function(path).score([{"costs": np.array([1, 2])}]) == [{"overall": 3.0}]
