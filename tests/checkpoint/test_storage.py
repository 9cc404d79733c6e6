"""Who checks which file while all read."""

from megastack.checkpoint.storage import share_checks


def test_each_rank_checks_the_file_that_it_reads_most_of() -> None:
    assert share_checks([{"a": 9, "b": 1}, {"b": 9}]) == [{"a"}, {"b"}]
    assert share_checks([{"a": 9, "b": 9}, {}]) == [{"a", "b"}, set()]


def test_ranks_that_read_the_same_share_the_checks() -> None:
    same = dict.fromkeys("abcdef", 5)
    checks = share_checks([same, same, same])
    assert [len(mine) for mine in checks] == [2, 2, 2]
    assert set().union(*checks) == set("abcdef")


def test_a_file_that_nobody_reads_is_not_checked() -> None:
    assert share_checks([{}, {}]) == [set(), set()]
