# SPDX-License-Identifier: Apache-2.0
"""Any request for any run is answered without a failure of the server, and only from the run's folder."""

import os
import random
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.rollouts import rollout, with_media, write_log, write_steps
from tests.helpers.viewer import request, token_of, viewer
from verl.viewer.rollout_store import SCHEMA, RolloutStore

LINES = [
    "{}", "[]", "3", "null", '{"step": null}', '{"step": "one"}', '{"step": [1]}', '{"step": 1e400}',
    "\ud800",
    '{"step": 7, "\\ud800": "\\udfff", "a": NaN, "b": 1e400, "c": "text", "d": {"e": [1, {"f": 2}]}}',
    '{"step": 8, "a": ' + "9" * 5000 + "}", '{"step": 9, "a": ' + "[" * 900 + "]" * 900 + "}", "[" * 100_000,
    '{"step": 10' + "0" * 400 + "}", '{"step": 1, "a": 0.5}', '{"step": 2, "a"',
]  # fmt: skip


def damage(folder):
    """Write a run whose every file is damaged, but for steps 1 and 2."""
    write_steps(folder, range(1, 3), **with_media(folder))
    lines = "\n".join(LINES).encode("utf-8", "surrogatepass")
    (folder / "experiment_log.jsonl").write_bytes(lines + b"\n\xff\xfe\n")
    rollouts = folder / "rollouts"
    whole = (rollouts / "step_1.parquet").read_bytes()
    for step, content in enumerate([b"", b"PAR1", whole[:-9], whole[: len(whole) // 2] + whole[-2000:]], 3):
        (rollouts / f"step_{step}.parquet").write_bytes(content)
    for start in range(4, len(whole) - 300, len(whole) // 12):  # columns of a file whose end is right
        (rollouts / f"step_{100 + start}.parquet").write_bytes(
            whole[:start] + b"\xff" * 64 + whole[start + 64 :]
        )
    pq.write_table(pa.table({"step": ["x"], "group": [1.5]}), rollouts / "step_20.parquet")
    pq.write_table(pa.table({"other": [1]}), rollouts / "step_21.parquet")
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    rows = pa.Table.from_pylist([rollout(22, 0, 0)], schema=SCHEMA)
    for step, column in ((22, "prompt_start"), (23, "prompt")):
        table = rows.set_column(rows.schema.get_field_index(column), column, broken)
        pq.write_table(table, rollouts / f"step_{step}.parquet")
    pq.write_table(rows, rollouts / f"step_{'9' * 200}.parquet")
    (rollouts / "step_24.parquet").mkdir()
    os.symlink("step_25.parquet", rollouts / "step_25.parquet")
    return folder


CONFIGS = [
    "", "{", "[]", "3", '{"trainer": 3}', '{"trainer": {"max_steps": "many"}}',
    '{"a": NaN, "\\ud800": 1e400}', '{"a": ' * 900 + "1" + "}" * 900, "[" * 100_000,
    '{"trainer": {"max_steps": ' + "9" * 400 + "}}", "x" * 5_000_000,
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    damage(folder / "damaged")
    write_log(folder / "whole", range(1, 3))
    (folder / "log/experiment_log.jsonl").mkdir(parents=True)
    (folder / os.fsdecode(b"\xff")).mkdir()
    write_log(folder / os.fsdecode(b"\xff"), range(1, 2))
    return folder


@pytest.fixture(scope="module")
def address(project):
    with viewer(project) as found:
        yield found


NUMBERS = [
    "",
    "0",
    "1",
    "-1",
    "9",
    "1e3",
    "nan",
    "inf",
    "1_0",
    "9" * 5000,
    "\u0663",
    "2147483648",
    "0x1",
    "%00",
]
TEXTS = [
    "",
    "a",
    "(",
    "\\",
    "%00",
    "%ff",
    "%ed%a0%80",
    "'\"<&",
    "\U0001f642",
    "a" * 20_000,
    "[" * 900,
    "square",
]
PATHS = [
    "/api/rollouts?", "/api/distributions?", "/api/neighbors/0/train/1/step1-0-0?", "/api/export?format=csv&",
]  # fmt: skip
COLUMNS = ["step", "score", "group", "run", "prompt", "num_media", "x", ""]


def queries(numbers):
    """Yield the parameters of random queries, some of them sound."""
    values = {
        "run": ["0", "1", "2", "3"],
        "sort": COLUMNS,
        "order": ["up", "down", "x"],
        "media": ["yes", "no"],
    }
    values |= dict.fromkeys(["text", "data_source", "finish_reason", "token", "x"], TEXTS)
    values |= dict.fromkeys(["offset", "limit", "step_min", "score_max", "advantage_min"], NUMBERS)
    for _ in range(150):
        names = numbers.choices(sorted(values), k=numbers.randrange(1, 5))
        yield "&".join(
            ["run=0", *(f"{name}={quote(numbers.choice(values[name]), safe='%')}" for name in names)]
        )


def test_any_query_is_answered(address):
    numbers = random.Random(0)
    statuses = set()
    for query in queries(numbers):
        path = numbers.choice(PATHS)
        statuses.add(request(address, f"{path}{query}").status)

    assert statuses == {200, 400}


def test_any_path_is_answered(address):
    parts = [*NUMBERS, *TEXTS, "..", ".", "%2e%2e", "%2f", "vendor", "index.html", "0" * 40 + ".jpg"]
    for part in (quote(part, safe="%") for part in parts):
        for path in (
            *(f"/{part}", f"//{part}/", f"/api/{part}", f"/api/runs/{part}/metrics"),
            *(f"/api/runs/0/groups/train/{part}/x", f"/api/runs/0/groups/train/1/{part}"),
            *(
                f"/media/{part}/x",
                f"/media/0/{part}",
                f"/videos/0/train/1/{part}/x",
                f"/videos/0/{part}/1/0/x",
            ),
        ):
            answer = request(address, path)
            assert answer.status < 500, path
    headers = ["If-Modified-Since", "If-None-Match", "Range", "Cookie", "If-Range"]
    for header in headers:
        for value in (
            "x",
            "bytes=" + "9" * 5000 + "-",
            "bytes=5-1,,",
            "\xff",
            "=;=",
            "Thu, 99 Foo 99999 99:99:99 GMT",
        ):
            assert request(address, "/app.js", **{header: value}).status < 500, (header, value)


@pytest.mark.nightly
def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(address):
    runs = request(address, "/api/runs").json
    number = next(index for index, run in enumerate(runs) if run["name"] == "damaged")
    for index in range(len(runs)):
        assert request(address, f"/api/runs/{index}/metrics").status == 200

    log = request(address, f"/api/runs/{number}/metrics").json
    assert {1, 7} <= set(log["step"]) and log["metrics"]["a"][log["step"].index(1)] == 0.5
    assert runs[number]["num_rollouts"] >= 16 and len(runs[number]["problems"]) >= 5
    for query in ("", "&text=square", "&sort=group&order=down"):
        rows = request(address, f"/api/rollouts?run={number}&limit=500{query}").json["rows"]
        for name in ("csv", "jsonl"):
            assert request(address, f"/api/export?format={name}&run={number}{query}").status == 200
        assert {1, 2} <= {row["step"] for row in rows}
        for row in rows:
            group = quote(row["group"] or "", safe="")
            place = f"{row['kind']}/{row['step'] or 0}/{group}"
            for path in (f"/api/runs/{number}/groups/{place}", f"/api/runs/{number}/prompts/{place}"):
                assert request(address, path).status in (200, 404)
            assert request(address, f"/api/neighbors/{number}/{place}?run={number}").status == 200
    for step in (*range(26), *range(100, 20_000, 500)):
        assert request(address, f"/api/runs/{number}/groups/train/{step}/step1-0-0").status in (200, 404)


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("//evil.example", None),
        ("///evil.example/x", None),
        ("/\\evil.example", None),
        ("/%5cevil.example", None),
        ("/vendor", "localhost:80@evil.example"),
        ("/vendor", "[::1"),
        ("/vendor", "127.0.0.1:8901/@evil.example"),
    ],
)
def test_no_redirect_leads_to_another_site(address, path, host):
    headers = {} if host is None else {"Host": host}
    for cookie in ({}, {"Cookie": ""}):
        answer = request(address, f"{path}?token={token_of(address)}", **headers, **cookie)

        assert answer.status < 500
        target = urlsplit(answer.headers.get("location", "/"))
        assert target.hostname in (None, "127.0.0.1"), answer.headers["location"]
        assert not answer.headers.get("location", "/").startswith(("//", "/\\"))


def test_links_out_of_the_runs_folder_are_not_followed(tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "runs" / "first"
    write_steps(outside, range(1, 2), **with_media(outside))
    write_log(outside, range(1, 2))
    (image, *_) = sorted((outside / "rollouts/media").iterdir())
    (run / "rollouts/media").mkdir(parents=True)
    (run / "rollouts/media" / image.name).symlink_to(image)
    (run / "rollouts/step_1.parquet").symlink_to(outside / "rollouts/step_1.parquet")
    (run / "experiment_log.jsonl").symlink_to(outside / "experiment_log.jsonl")
    linked = tmp_path / "runs" / "second"
    linked.mkdir()
    (linked / "rollouts").symlink_to(outside / "rollouts")
    RolloutStore(tmp_path / "runs" / "third").write(2, [rollout(2, 0, 0)])
    (tmp_path / "runs/third/rollouts/step_3.parquet").symlink_to("step_2.parquet")

    with viewer(tmp_path / "runs") as address:
        first, second, third = request(address, "/api/runs").json

        assert [run["num_rollouts"] for run in (first, second, third)] == [0, 0, 2]
        assert list(first["problems"]) == ["experiment_log.jsonl"] and list(second["problems"]) == [
            "rollouts"
        ]
        assert request(address, "/api/runs/0/metrics").json["step"] == []
        for number in (0, 1):
            assert request(address, f"/media/{number}/{image.name}").status == 404
            assert request(address, f"/api/runs/{number}/groups/train/1/step1-0-0").status == 404


def test_the_text_summary_of_a_damaged_run_is_printed(project, capsys):
    from verl.viewer.process import main

    main([str(project), "--text"])

    assert "damaged" in capsys.readouterr().out


def test_runs_with_any_config_log_and_notes_have_a_line_and_can_be_exported(tmp_path):
    huge = (
        '{"step": 1, "reward/overall": '
        + "9" * 400
        + ', "perf/throughput": 1e308, "timing_s/step": -1e308}\n'
    )
    for number, config in enumerate(CONFIGS):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        (folder / "experiment_log.jsonl").write_text(
            huge * (number % 3) + "\n".join(LINES[:-2]), errors="replace"
        )
        (folder / "experiment_config.json").write_text(config)
        (folder / "notes.json").write_text(config)
    write_log(tmp_path / os.fsdecode(b"=\xff"), range(1, 3))
    with viewer(tmp_path) as address:
        lines = request(address, "/api/overview").json
        everything = "&".join(f"run={number}" for number in range(len(lines)))
        for path in ("configs", "metrics.csv", "metrics.jsonl"):
            answer = request(address, f"/api/{path}?{everything}&all=yes")
            assert answer.status == 200, path
        for query in ("run=99", "run=-1", "run=x", "run=", f"run={'9' * 5000}"):
            assert request(address, f"/api/configs?{query}").status == 404

    assert len(lines) == len(CONFIGS) + 1
    assert [bool(line["problem"]) for line in lines[:-1]].count(True) >= 9
    assert lines[-1]["reward"]["last"] == 0.02
