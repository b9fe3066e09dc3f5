# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from verl.config.algorithm import REJECTIONS, Bounds, Rejection, parse_bounds, parse_rejections

SECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.0", Bounds(None, 2.0)),
        ("5", Bounds(None, 5.0)),
        ("0.5_5.0", Bounds(0.5, 5.0)),
        ("0.5_5", Bounds(0.5, 5.0)),
        ("0_3", Bounds(0.0, 3.0)),
    ],
)
def test_one_threshold_clips_and_two_drop(text, expected):
    assert parse_bounds(text, "an.option") == expected


@pytest.mark.parametrize(
    "text", ["", "big", "0.55", "-2", "nan", "inf", "2_5", "5_0.5", "1_1", "0.5_1_5", "_5"]
)
def test_a_threshold_that_cannot_hold_a_weight_of_one_is_refused(text):
    with pytest.raises(ValueError, match=f"`an.option` must be a number of at least 1 .*got {text!r}"):
        parse_bounds(text, "an.option")


def test_a_threshold_that_yaml_read_as_one_number_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="quote it in YAML"):
        parse_bounds("0.55", "an.option")  # what YAML makes of 0.5_5


def test_rejections_are_paired_with_their_thresholds():
    rejections = parse_rejections(" seq_mean_k1, token_k1,seq_max_k3", "0.99_1.01, 4 ,0.5", SECTION)

    assert rejections == (
        Rejection("seq_mean", "k1", 0.99, 1.01),
        Rejection("token", "k1", 0.25, 4.0),  # one number u is 1/u_u
        Rejection("seq_max", "k3", None, 0.5),
    )
    assert [rejection.name for rejection in rejections] == ["seq_mean_k1", "token_k1", "seq_max_k3"]


def test_there_are_eleven_rejections_and_all_can_be_read():
    assert len(REJECTIONS) == 11
    assert "seq_max_k1" not in REJECTIONS
    names = [
        rejection.name for rejection in parse_rejections(",".join(REJECTIONS), ",".join("2" * 11), SECTION)
    ]
    assert names == list(REJECTIONS)


def test_no_names_reject_nothing():
    assert parse_rejections(None, None, SECTION) == ()


@pytest.mark.parametrize(
    ("names", "thresholds", "message"),
    [
        (None, "2.0", "rollout_rs_threshold` must be null without `algorithm.rollout_correction.rollout_rs`"),
        ("token_k1", None, r"one threshold for each of \['token_k1'\].*got None"),
        ("token_k1,token_k2", "2.0", "one threshold for each"),
        ("token_k1", "2.0,3.0", "one threshold for each"),
        ("token_k1,token_k1", "2.0,3.0", "each name once, got 'token_k1' twice"),
        ("seq_max_k1", "2.0", "names of .*'seq_max_k2'.*got 'seq_max_k1'"),
        ("sequence", "2.0", "got 'sequence'"),
        ("", "2.0", "got ''"),
        ("token_k1", "1.0", "of token_k1 must be LOW_HIGH .*got '1.0'"),
        ("token_k1", "2.0_0.5", "of token_k1 must be LOW_HIGH"),
        ("token_k1", "0_2", "of token_k1 must be LOW_HIGH"),
        ("seq_mean_k1", "1.1_1.2", "of seq_mean_k1 must be LOW_HIGH"),
        ("token_k2,seq_sum_k3", "0.1,0", "of seq_sum_k3 must be one number above 0, got '0'"),
        ("token_k2", "0.1_0.2", "of token_k2 must be one number above 0"),
        ("token_k2", "some", "of token_k2 must be one number above 0, got 'some'"),
    ],
)
def test_invalid_rejections_are_errors_that_name_the_option(names, thresholds, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_rejections(names, thresholds, SECTION)

    assert str(caught.value).startswith(f"`{SECTION}.rollout_rs")


def test_reading_options_needs_no_torch():
    code = "import sys, verl.config.algorithm; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
