# SPDX-License-Identifier: Apache-2.0
"""Any template renders a row or is refused by name: within its time, its memory and its sandbox."""

import pickle
import resource
import time

import jinja2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2.sandbox import SandboxedEnvironment

from verl.data.bad_rows import BadRowError
from verl.data.prompt_template import RENDER_MEMORY, PromptFormat

any_text = st.text(st.characters(exclude_categories=()), max_size=10)
expressions = st.recursive(
    st.sampled_from(
        ["content", "row", "number", "absent", "1", "'a'", "10**9", "range(9)", "[]", "{}", "self", "loop"]
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "**", "~", "%", "//", "==", " in ", " and "]), inner).map(
            "".join
        ),
        inner.map("({})".format),
        st.tuples(
            inner,
            st.sampled_from(
                [
                    "trim",
                    "length",
                    "first",
                    "last",
                    "int",
                    "lower",
                    "upper",
                    "center(9)",
                    "join",
                    "map('x')",
                    "tojson",
                    "safe",
                    "list",
                    "sort",
                    "reverse",
                    "sum",
                    "batch(2)",
                    "format(1)",
                    "attr('__class__')",
                    "no_such",
                ]
            ),
        ).map("|".join),
        st.tuples(inner, st.sampled_from(["defined", "none", "string", "odd", "sequence", "no_such"])).map(
            " is ".join
        ),
        st.tuples(inner, st.sampled_from(["text", "__class__", "format", "x", "_"])).map(".".join),
        st.tuples(inner, inner).map(lambda pair: f"{pair[0]}[{pair[1]}]"),
        inner.map("{}()".format),
    ),
    max_leaves=5,
)
sources = st.recursive(
    any_text | expressions.map("{{{{ {} }}}}".format),
    lambda inner: st.one_of(
        st.tuples(expressions, inner).map(lambda pair: f"{{% if {pair[0]} %}}{pair[1]}{{% endif %}}"),
        st.tuples(expressions, inner).map(lambda pair: f"{{% for x in {pair[0]} %}}{pair[1]}{{% endfor %}}"),
        st.tuples(expressions, inner).map(lambda pair: f"{{% set row = {pair[0]} %}}{pair[1]}"),
        inner.map(lambda text: f"{{% macro m() %}}{text}{{{{ m() }}}}{{% endmacro %}}{{{{ m() }}}}"),
        st.lists(inner, max_size=3).map("".join),
    ),
    max_leaves=6,
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=5,
)
rows = st.dictionaries(st.sampled_from(["row", "number", "content", "self", "range", "loop"]), plain_values)

ENDLESS = {
    "two loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power, when it is compiled": "{{ 10**(10**10) }}",
    "a power, when it is rendered": "{% set n = 10 %}{{ n**(n**n) }}",
}
HUGE = {
    "a repeated text": "{{ 'a' * 10**10 }}",
    "a doubling": "{% set n = namespace(a='a') %}{% for i in range(60) %}{% set n.a = n.a*2 %}{% endfor %}",
    "a wide field": "{{ '%9999999999d' | format(1) }}",
    "a wide column": "{{ content | center(9999999999) }}",
    "a wide format": "{{ '{:>9999999999}'.format(1) }}",
    "a list": "{{ ([0] * 10**9) | length }}",
    "a long prompt": "{{ 'a' * 20000000 }}",
}
BROKEN = {
    "a long range": "{% for i in range(10**12) %}{% endfor %}",
    "a macro that calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "an escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an escape by a format": "{{ '{0.__class__}'.format(content) }}",
    "an escape by a filter": "{{ (content | attr('__class__')).mro() }}",
    "an escape by a function": "{{ cycler.__init__.__globals__.os.getcwd() }}",
    "a file": "{% include '/etc/passwd' %}",
    "loops in loops": "{% for x in content %}" * 30 + "{% endfor %}" * 30,
    "conditions in conditions": "{% if content %}" * 120 + "{% endif %}" * 120,
}


def format_of(folder, source, timeout_s=20.0):
    (folder / "prompt.jinja").write_text(source, encoding="utf-8", errors="replace")
    return PromptFormat(str(folder / "prompt.jinja"), timeout_s)


@given(sources, any_text, rows)
@example("{{ row }}", "?", {"row": "\ud800"})
def test_any_template_renders_any_row_or_is_an_error_that_names_it(tmp_path, source, content, row):
    try:
        prompt_format = format_of(tmp_path, source)
    except ValueError as error:
        assert f"`data.format_prompt` ({tmp_path / 'prompt.jinja'})" in str(error)
        return
    try:
        assert isinstance(prompt_format(content, row), str)
    except BadRowError as error:
        assert f"`data.format_prompt` ({tmp_path / 'prompt.jinja'}) failed" in str(error)
    finally:
        prompt_format.close()


@given(st.binary(max_size=100))
def test_any_bytes_as_a_template(tmp_path, content):
    (tmp_path / "prompt.jinja").write_bytes(content)

    try:
        assert isinstance(PromptFormat(str(tmp_path / "prompt.jinja"))("?", {}), str)
    except ValueError as error:
        assert "`data.format_prompt`" in str(error)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_does_not_end_is_given_up_in_time(tmp_path, source):
    prompt_format = format_of(tmp_path, source, timeout_s=0.5)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"`data.format_prompt` \(.*\) did not end within 0.5 s") as raised:
        prompt_format("?", {})

    assert time.monotonic() - start < 30
    assert "does it loop forever?" in str(raised.value)


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_a_template_that_takes_too_much_memory_is_a_bad_row(tmp_path, source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    prompt_format = format_of(tmp_path, source)

    with pytest.raises(BadRowError, match=r"`data.format_prompt` \(.*\) (failed|makes a prompt of)"):
        prompt_format("?", {})

    prompt_format.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < RENDER_MEMORY // 1024


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_a_template_that_breaks_or_leaves_the_sandbox_is_a_bad_row_and_the_next_row_is_rendered(
    tmp_path, source
):
    prompt_format = format_of(tmp_path, f"{{% if bad %}}{source}{{% else %}}{{{{ content }}}}{{% endif %}}")

    with pytest.raises(BadRowError, match=r"`data.format_prompt` \(.*\) failed"):
        prompt_format("?", {"bad": True})

    prompt_format.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ content | trim }} {{ row }}",
        "{% if number > 3 %}{{ row[0] }}{% else %}{{ row }}{% endif %}",
        "{% for x in row %}{{ loop.index }}{{ x }},{% endfor %}",
        "{{ row | join(number ~ '') }}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(content) }}{{ range(3) | list }}",
    ],
)
@given(any_text, st.integers(), plain_values)
def test_a_template_gives_what_jinja_gives_also_after_a_journey(tmp_path, source, content, number, value):
    values = {"number": number, "row": value, "content": content}
    try:
        expected = SandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(source).render(values)
    except (jinja2.TemplateError, TypeError, LookupError):
        return
    prompt_format = pickle.loads(pickle.dumps(format_of(tmp_path, source)))

    rendered = prompt_format(content, {"number": number, "row": value})

    prompt_format.close()
    assert rendered == expected
