"""Names of environments."""

import sys

import pytest
from sample_envs import Hello

from agentrl.env import Environment, register, resolve
from agentrl.env.registry import Served, available, with_id
from agentrl.errors import ConfigError

SOURCE = '''
from agentrl.env import Environment, Task

class Tiny(Environment):
    """{doc}"""

class NotOne:
    pass
'''


def test_a_registered_class_is_found_by_its_id():
    assert resolve("hello") is Hello
    assert Hello.id == "hello" and Hello.max_sessions == 256
    assert available()["hello"] == "sample_envs:Hello"


def test_a_module_string_needs_no_registration():
    assert resolve("sample_envs:Hello") is Hello
    assert Hello.id == "hello"


def test_files_of_the_same_name_do_not_replace_each_other(tmp_path):
    found = []
    for name in ("a", "b"):
        path = tmp_path / name / "env.py"
        path.parent.mkdir()
        path.write_text(SOURCE.format(doc=name))
        found.append(resolve(f"{path}:Tiny"))
    assert [each.__doc__ for each in found] == ["a", "b"]
    assert found[0].id == "Tiny"
    assert resolve(f"{tmp_path}/a/env.py:Tiny") is found[0]


def test_an_entry_point_gives_its_name(tmp_path, monkeypatch):
    (tmp_path / "plugin_env.py").write_text(SOURCE.format(doc="plugged"))
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.environments]\ntiny = plugin_env:Tiny\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert available()["tiny"] == "plugin_env:Tiny"
    assert resolve("tiny").id == "tiny"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "no environment 'nothing'; known are .*hello"),
        ("no_such_module:Env", "no module named 'no_such_module'"),
        ("sample_envs:Nope", "sample_envs has no 'Nope'"),
        ("no_file.py:Env", "no file .*no_file.py"),
    ],
)
def test_a_name_without_a_class_says_why(name, says):
    with pytest.raises(ConfigError, match=says):
        resolve(name)


def test_register_without_an_id_says_what_to_write():
    with pytest.raises(ConfigError, match=r'write @register\("my-env"\)'):
        register(Environment)


def test_a_file_imports_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_env.py").write_text(SOURCE.format(doc="beside"))
    (tmp_path / "its_env.py").write_text(
        "import neighbour_env\nclass Its(neighbour_env.Tiny):\n    pass\n"
    )
    assert resolve(f"{tmp_path}/its_env.py:Its").__mro__[1].__doc__ == "beside"


def test_a_file_without_the_class_and_one_that_needs_something(tmp_path, monkeypatch):
    (tmp_path / "env.py").write_text(SOURCE.format(doc="x"))
    with pytest.raises(ConfigError, match=r"'NotOne' of .*env\.py is not an Environment class"):
        resolve(f"{tmp_path}/env.py:NotOne")
    (tmp_path / "needy_env.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="needs 'surely_not_installed'"):
        resolve("needy_env:Env")
    with pytest.raises(ConfigError, match=r"needy_env\.py needs 'surely_not_installed'"):
        resolve(f"{tmp_path}/needy_env.py:Env")
    (tmp_path / "half.py").write_text("x = 1\nclass Env(:\n")
    with pytest.raises(ConfigError, match=r"half\.py, line 2: "):
        resolve(f"{tmp_path}/half.py:Env")


def test_a_module_in_the_current_folder_needs_no_installation(tmp_path, monkeypatch):
    (tmp_path / "right_here_env.py").write_text(SOURCE.format(doc="x"))
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    with pytest.raises(ConfigError, match="no module named 'right_here_env'"):
        resolve("right_here_env:Tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("right_here_env:Tiny").__name__ == "Tiny"


def test_ids_are_unique_and_well_formed():
    with pytest.raises(ConfigError, match="'hello' is taken by sample_envs:Hello"):
        register("hello")(type("Other", (Environment,), {}))
    for bad in ("", "a b", "a/b", "ü/"):
        with pytest.raises(ConfigError, match="may hold letters"):
            register(bad)


def test_a_subclass_does_not_inherit_the_id():
    class Child(Hello):
        pass

    assert with_id(Child).id == "Child" and Hello.id == "hello"


def test_a_served_environment_is_found_by_every_name_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_env.py").write_text(SOURCE.format(doc="x"))
    served = Served([Hello, "own_env.py:Tiny"])
    assert served.ids == ["hello", "Tiny"]
    tiny = served.resolve("Tiny")
    for name in ("own_env.py:Tiny", "./own_env.py:Tiny", f"{tmp_path}/own_env.py:Tiny"):
        assert served.resolve(name) is tiny
    assert served.resolve("hello") is served.resolve("sample_envs:Hello") is Hello
    with pytest.raises(ConfigError, match="no environment 'workshop' here; this server has hello"):
        served.resolve("workshop")


def test_a_file_without_its_class_and_a_misspelt_class_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_env.py").write_text(SOURCE.format(doc="x"))
    with pytest.raises(ConfigError, match=r"as in own_env\.py:Tiny"):
        resolve("own_env.py")
    with pytest.raises(ConfigError, match="did you mean 'Tiny'"):
        resolve("own_env.py:Tyny")


def test_a_server_has_one_environment_of_an_id():
    Served(["hello", Hello])
    other = type("Other", (Environment,), {"id": "hello"})
    with pytest.raises(ConfigError, match="two environments have the id 'hello'"):
        Served(["hello", other])
