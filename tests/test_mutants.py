"""Mutants: each operator does what its line of the table says, and the tests nearest to it run."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from scripts.mutants.__main__ import Copy, choose_tests, draw_mutants, report, try_mutant
from scripts.mutants.__main__ import Test as Known
from scripts.mutants.operators import Mutant, find_mutants, read_mutants

ROOT = Path(__file__).parents[1]


def changed(source: str, operator: str) -> set[str]:
    found = find_mutants("m.py", source)
    return {one.apply(source).strip() for one in found if one.operator == operator}


@pytest.mark.parametrize(
    ("source", "operator", "expected"),
    [
        ("a < b", "comparison", {"a >= b"}),
        ("a < b <= c", "boundary", {"a <= b <= c", "a < b < c"}),
        ("x is not None", "comparison", {"x is None"}),
        ("(a) + (b - c)", "arithmetic", {"(a) - (b - c)", "(a) + (b + c)"}),
        ("x //= 2", "arithmetic", {"x /= 2"}),
        ("x = [0, 1, 7, 0.5, True]", "constant", {
            "x = [1, 1, 7, 0.5, True]", "x = [0, 0, 7, 0.5, True]", "x = [0, 1, 8, 0.5, True]",
            "x = [0, 1, 7, 1.0, True]", "x = [0, 1, 7, 0.5, False]"}),
        ("a and b and c", "connective", {"a or b and c", "a and b or c"}),
        ("x = not -y", "negation", {"x = -y", "x = not y"}),
        ("a if f(x) else b", "condition", {"a if not (f(x)) else b"}),
        ("a if x > 0 else b", "condition", set()),
        ("np.argmin(min(x))", "extreme", {"np.argmax(min(x))", "np.argmin(max(x))"}),
        ("x[1:] + x[:-1]", "slice", {"x[:-1] + x[:-1]", "x[1:] + x[1:]"}),
        ("def f():\n    return 3 * x", "return", {"def f():\n    return None"}),
        ("x.sort()", "statement", {"pass"}),
        ("'é' in x and 'ü' not in y", "comparison",
         {"'é' not in x and 'ü' not in y", "'é' in x and 'ü' in y"}),
    ],
)  # fmt: skip
def test_an_operator_changes_one_place(source: str, operator: str, expected: set[str]) -> None:
    assert changed(source, operator) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Only 1 docstring, 2 lines."""',
        "raise ValueError(1 + 2)",
        "assert x == 0",
        "x = zip(a, b, strict=True)",
        "x = f'{a + 1:.3f}'",
        "def f(x: Literal[1, 2]) -> Literal[0]: ...",
        "if TYPE_CHECKING:\n    import x",
    ],
)
def test_messages_and_types_are_left_alone(source: str) -> None:
    assert find_mutants("m.py", source) == []


def test_every_mutant_of_a_folder_is_another_program() -> None:
    mutants = read_mutants(ROOT, ("objectives",))
    assert len(mutants) > 500
    for mutant in mutants[::31]:
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant
        before, after = mutant.lines(source)
        assert before != after


def test_lines_are_drawn_by_the_seed_and_no_line_twice() -> None:
    mutants = find_mutants("m.py", "\n".join(f"x{k} = {k} + y < 1" for k in range(50)))
    one = draw_mutants(mutants, seed=1, count=20)
    assert one == draw_mutants(mutants, seed=1, count=20)
    assert one != draw_mutants(mutants, seed=2, count=20)
    assert len({mutant.line for mutant in one}) == 20


MUTANT = Mutant("src/equifed/m.py", 2, 0, 1, "constant", "1", "Box.open", 3, 4)


def test_specific_tests_of_the_line_come_first_as_long_as_there_is_time() -> None:
    here, there = "src/equifed/m.py::Box.open", "src/equifed/m.py::other"
    broad = Known("a.py::broad", 0.1, {here: 0b11111, **dict.fromkeys("abcdef", 1)})
    narrow = Known("b.py::narrow", 0.1, {here: 0b01001})
    dear = Known("c.py::dear", 9.0, {here: 0b10001})
    other_way = Known("d.py::other_way", 0.1, {here: 0b00111})
    apart = Known("e.py::apart", 0.1, {there: 1})
    tests = [broad, dear, apart, narrow, other_way]
    assert choose_tests(MUTANT, tests, seconds=2.0) == [narrow, broad]
    assert choose_tests(MUTANT, tests, seconds=20.0) == [narrow, broad, dear]
    new_line = replace(MUTANT, first=7, last=7)
    assert set(choose_tests(new_line, tests, seconds=2.0)) == {narrow, broad, other_way}
    of_the_class = replace(MUTANT, function="Box", first=0, last=-1)
    assert set(choose_tests(of_the_class, tests, seconds=2.0)) == {narrow, broad, other_way}
    of_the_module = replace(of_the_class, function="")
    assert set(choose_tests(of_the_module, tests, seconds=5.0)) == {*tests} - {dear}


def test_many_cases_of_one_function_do_not_shut_out_the_others() -> None:
    here = "src/equifed/m.py::Box.open"
    cases = [Known(f"a.py::test[{k}]", 0.1, {here: 31}) for k in range(50)]
    other = Known("a.py::other", 0.1, {here: 31, "b": 1})
    assert choose_tests(MUTANT, [*cases, other], seconds=1.5)[3] == other


def test_the_modules_own_tests_come_before_others_that_call_as_much() -> None:
    here = "src/equifed/m.py::Box.open"
    others = [Known(f"t/test_a.py::test[{k}]", 0.1, {here: 31, "a": 1}) for k in range(9)]
    own = [Known(f"t/test_m.py::test[{k}]", 0.1, {here: 31, **dict.fromkeys("abcd", 1)})
           for k in range(9)]  # fmt: skip
    assert choose_tests(MUTANT, [*others, *own], seconds=2.5)[:9] == own


def test_a_constants_mutant_is_tried_by_files_that_name_it_and_its_module() -> None:
    mutants = find_mutants("src/m.py", "MOST, LEAST = 3, 7\n\ndef f():\n    return MOST + 1\n")
    assert {one.constants for one in mutants} == {("MOST", "LEAST"), ()}
    named, other = Known("a.py::told", 0.1, {}), Known("b.py::other", 0.1, {"src/m.py::f": 1})
    words = {"a.py": frozenset(("m", "LEAST")), "b.py": frozenset(("n", "LEAST"))}
    constant, *_, inside = mutants
    assert choose_tests(constant, [other, named], 5.0, words.__getitem__) == [named, other]
    assert choose_tests(inside, [other, named], 5.0, words.__getitem__) == [other]


def test_places_in_a_function_have_the_lines_of_their_statement() -> None:
    source = """
class A:
    b: int = 1

    def f(self, x=2):
        def g():
            return 3
        return [
            4,
            g(),
        ]
"""
    found = {m.text: m for m in find_mutants("m.py", source) if m.operator == "constant"}
    places = {t: (m.function, m.first, m.last) for t, m in found.items()}
    assert places == {
        "0": ("A", 0, -1), "3": ("A.f", 0, 0), "4": ("A.f", 2, 2), "5": ("A.f", 3, 6),
    }  # fmt: skip


@pytest.mark.long
def test_a_mutant_is_tried_in_the_copy_which_is_restored(tmp_path: Path) -> None:
    source = "def sign(x):\n    return 1 if x > 0 else -1\n"
    module, tests = tmp_path / "src" / "signs.py", tmp_path / "test_signs.py"
    module.parent.mkdir()
    module.write_text(source)
    tests.write_text(
        "from signs import sign\n\n\ndef test_both():\n    assert sign(2) == -sign(-2) == 1\n"
    )
    known, copy = [Known("test_signs.py::test_both", 0.0, {})], Copy(tmp_path)
    for mutant in find_mutants("src/signs.py", source):
        if mutant.operator in {"comparison", "boundary"}:
            row = try_mutant(mutant, copy, known, limit=60)
            survives = row["after"] == "return 1 if x >= 0 else -1"  # nobody tries 0
            assert row["outcome"] == ("survived" if survives else "killed")
            assert module.read_text() == source
    copy.close()


def test_survivors_with_a_reason_are_not_counted() -> None:
    told = {"file": "m.py", "line": 3, "operator": "boundary", "before": "a < b", "tests": 4}
    rows = [
        {**told, "after": "a <= b", "outcome": "survived"},
        {**told, "after": "a >= b", "outcome": "survived"},
        {**told, "after": "a", "outcome": "killed"},
    ]
    text = report(rows, {("m.py", "a < b", "a <= b"): "a is never b"})
    assert "1 of 2 mutants died (50.0%); 1 more are the same" in text
    assert "equivalent: a is never b" in text
