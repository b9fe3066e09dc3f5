# SPDX-License-Identifier: Apache-2.0
"""Tools in verl's form: a YAML file, classes with `create`, `execute` and `release`."""

import sys

import pytest

from verl.agents.interface import ToolCall
from verl.agents.tools.loading import load_tools
from verl.agents.tools.tool_pool import ToolPool
from verl.config.multi_turn import MultiTurnConfig

TOOL = """
class Answer:
    def __init__(self, text, image=None):
        self.text, self.image, self.video = text, image, None

class Lookup:
    def __init__(self, config, tool_schema):
        self.config, self.name, self.states = config, tool_schema["function"]["name"], {}

    async def create(self, instance_id=None, truth=None, **kwargs):
        self.states["one"] = truth
        return "one", Answer("made")

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["word"] == "image":
            from PIL import Image
            return Answer("seen", [Image.new("RGB", (2, 2))]), 0.5, {}
        truth = self.states[instance_id]
        return f"{self.config['greeting']} {parameters['word']} {truth} {kwargs}", 1.0, {"metric": 1}

    async def release(self, instance_id, **kwargs):
        with open(self.config["log"], "a") as file:
            file.write(f"released {instance_id} {self.states.pop(instance_id)}")
"""
YAML = """
tools:
  - class_name: {module}.Lookup
    config: {{greeting: hello, log: "{log}"}}
    tool_schema:
      type: function
      function:
        name: lookup
        description: Look a word up.
        parameters:
          type: object
          properties: {{word: {{type: string, description: Word.}}}}
          required: [word]
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """The YAML file, next to the module of its class."""
    module = f"tools_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(TOOL)
    path = tmp_path / "tools.yaml"
    path.write_text(YAML.format(module=module, log=tmp_path / "log"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return path


def test_a_tool_of_verl_is_created_executed_and_released(config_file):
    options = MultiTurnConfig(enable=True, tool_config_path=str(config_file))
    kwargs = {"create_kwargs": {"truth": 7}, "execute_kwargs": {"extra": 1}}
    with ToolPool(options) as pool:
        pool.start("a", {"tools_kwargs": {"lookup": kwargs}})
        words = ("cat", "image")
        calls = [ToolCall("lookup", {"word": word}) for word in words]
        pool.submit("a", calls)
        ((_, (text, image)),) = pool.ready(60.0)
        pool.end("a")

    assert (text.text, text.reward) == ("hello cat 7 {'extra': 1}", 1.0)
    assert (image.text, image.reward, len(image.images)) == ("seen", 0.5, 1)
    assert (config_file.parent / "log").read_text() == "released one 7"


def test_the_schema_is_that_of_the_file(config_file):
    (tool,) = load_tools(MultiTurnConfig(enable=True, tool_config_path=str(config_file)))

    (schema,) = tool.schemas
    assert schema["function"]["name"] == tool.name == "lookup"
    assert schema["function"]["parameters"]["required"] == ["word"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tools:", "tool:", r"tools.yaml must have a list `tools` of entries like {class_name"),
        ("tool_schema", "schema", r"entry 0 must be like .*'tool_schema' is wrong or missing"),
        (".Lookup", ".Missing", r"entry 0: .*Missing cannot be imported: AttributeError"),
        (".Lookup", ".Answer", r"Answer has no method \['create', 'execute', 'release'\]"),
    ],
)
def test_a_wrong_entry_is_named(config_file, old, new, message):
    config_file.write_text(config_file.read_text().replace(old, new))

    with pytest.raises(ValueError, match=r"`worker.rollout.multi_turn.tool_config_path`(?s:.*)" + message):
        load_tools(MultiTurnConfig(enable=True, tool_config_path=str(config_file)))


def test_a_tool_that_verl_ships_is_refused_with_a_reason(config_file):
    text = config_file.read_text()
    start = text.index("class_name: ")
    line = text[start : text.index("\n", start)]
    config_file.write_text(text.replace(line, "class_name: verl.tools.search_tool.SearchTool"))

    with pytest.raises(ValueError, match="verl's own tools are not part of this package"):
        load_tools(MultiTurnConfig(enable=True, tool_config_path=str(config_file)))
