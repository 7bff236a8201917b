"""What is counted, and in which row."""

from textwrap import dedent

from scripts.size import Size, count_statements, find_folder, measure

MODULE = dedent(
    '''\
    """A docstring."""

    LIMIT = 3
    """A remark on a value is a statement: an expression."""


    class Box:
        """Another docstring."""

        def open(self) -> int:
            """One more."""
            if LIMIT:
                return (
                    1
                )
            return 2
    '''
)


def test_statements_are_counted_without_docstrings():
    # LIMIT, the remark, class, def, if, return, return
    assert count_statements(MODULE) == 7


def test_a_function_of_a_docstring_alone_is_one_statement():
    assert count_statements('def f():\n    """Do nothing."""\n') == 1


def test_rows_are_the_folders_of_the_package_and_those_beside_it():
    assert find_folder("src/equifed/flower/secure/sums.py") == "equifed/flower"
    assert find_folder("src/equifed/__init__.py") == "equifed"
    assert find_folder("tests/algorithms/test_afl.py") == "tests"
    assert find_folder("docs/conf.py") is None


def test_the_package_is_the_sum_of_its_folders():
    files = {
        "src/equifed/__init__.py": "x = 1\n",
        "src/equifed/data/a.py": "x = 1\ny = 2\n",
        "src/equifed/data/b.py": MODULE,
        "scripts/size.py": "x = 1\n",
    }
    sizes = measure(files)
    assert sizes["equifed/data"] == Size(2 + MODULE.count("\n"), 2, 9)
    assert sizes["src"] == sizes["equifed"].plus(sizes["equifed/data"])
    assert sizes["scripts"] == Size(1, 1, 1)
