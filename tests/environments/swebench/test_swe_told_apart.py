"""The measurement of how well altered values are told from the authors'."""

import re

import told_apart

from agentrl_swebench.alter import Edit

TESTS = "".join(
    f"def test_{k}():\n    assert f({k + 3}) == {k * 7 % 5 + 21}\n\n\n" for k in range(9)
)


def figures(text):
    lines = re.findall(r"^(.+?) +(\d\.\d+)  (\d\.\d+)$", text, re.MULTILINE)
    return {name: (float(pairs), float(found)) for name, pairs, found in lines}


def test_a_rule_that_always_finds_the_original_has_share_one(tmp_path, capsys, monkeypatch):
    """As it was where a changed number was always larger."""
    for k in range(4):
        (tmp_path / f"test_{k}.py").write_text(TESTS)

    def larger(source, function, choose, number):
        value = function.body[0].test.comparators[0]
        start = sum(map(len, source.splitlines(keepends=True)[: value.lineno - 1]))
        start += value.col_offset
        return [Edit(start, start + len(str(value.value)), str(value.value + 50))]

    monkeypatch.setattr(told_apart, "draw_edits", larger)
    assert told_apart.main([str(tmp_path)]) == 0
    found = figures(capsys.readouterr().out)
    assert found["smaller number"] == found["all"] == (1.0, 1.0)
    assert found["True"] == found["chance"] == (0.5, 0.5)


def test_the_real_draw_is_measured_and_folders_without_tests_are_named(tmp_path, capsys):
    assert told_apart.main([str(tmp_path)]) == 1
    assert "no tests with values" in capsys.readouterr().err
    for k in range(4):
        (tmp_path / f"test_{k}.py").write_text(TESTS)
    (tmp_path / "test_not_python.py").write_text("def test(:\n")
    assert told_apart.main([str(tmp_path), "--tests", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 files, 12 tests")
    assert all(0 <= figure <= 1 for both in figures(said).values() for figure in both)
