"""docs/rules.md is what `tools/rules_table.py` makes of the rules as they are, and says what the proof tried."""

from __future__ import annotations

from rules_table import FILE, Tried, differing, table, tried_in


def test_the_file_is_up_to_date():
    """All of it follows from the rules and samples, but the numbers of PyTorch's calls, which the proof holds."""
    text = FILE.read_text()
    assert table(tried_in(text)) == text, "run `make rules-table`"


def test_numbers_are_read_back_as_they_were_written():
    """Where the proof has not run, its numbers stay."""
    tried = {"aten.mm.default": Tried(12, (2, 5)), "aten.abs.default": Tried(3, ())}
    found = tried_in(table(tried))
    assert found["aten.mm.default"] == Tried(12, (2, 3, 4, 5))  # 3 and 4: samples written here
    assert found["aten.abs.default"].samples == 3 and found["aten.t.default"].samples == 0


def test_a_proof_that_tried_less_is_told():
    """A tenth more or less is another processor; half is a sample that was lost."""
    before = {"aten.mm.default": Tried(100, (2, 3))}
    assert not differing(before, {"aten.mm.default": Tried(92, (2, 3))})
    assert differing(before, {"aten.mm.default": Tried(50, (2, 3))}) == [
        "aten.mm.default: 50 calls on axes (2, 3), not 100 on (2, 3)"
    ]
    assert differing(before, {"aten.t.default": Tried(50, (2,))})
