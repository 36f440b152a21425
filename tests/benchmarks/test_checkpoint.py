from benchmarks.checkpoint import Model, measure_loading, measure_saving, saving_rows


def test_the_state_has_the_size_that_was_asked_for():
    for megabytes in (0.5, 1.0, 10.0):
        size = 12 * sum(parameter.numel() for parameter in Model(megabytes).parameters())
        assert abs(size - megabytes * 1e6) <= 12 * 512


def test_sides_save_and_load(ranks, tmp_path):
    measured = ranks(measure_saving, 2, 1.0, 1, 1, str(tmp_path))[0]
    assert {side: len(saves) for side, saves in measured["taken"].items()} == {
        "ours": 1,
        "asynchronous": 1,
        "lightning": 1,
        "copy": 1,
    }
    for saves in measured["taken"].values():
        assert 0 < saves[0]["blocked"] <= saves[0]["total"]
    assert 1.0e6 <= measured["bytes"] < 1.2e6
    (saved,) = (tmp_path / "ours").iterdir()
    (file,) = (tmp_path / "lightning").iterdir()
    seconds = ranks(measure_loading, 3, [str(saved), str(file)], 2)[0]
    assert [len(each) for each in seconds] == [2, 2]
    assert min(map(min, seconds)) > 0
    rows = {row["side"]: row for row in saving_rows(1.0, 2, measured)}
    assert rows["trainwright"]["of_ours"] == rows["copy of the files, fsync"]["of_copy"] == 1.0
    # What both ranks hold is copied by one of them, half of it by each.
    assert rows["trainwright, asynchronous"]["peak_MiB"] >= 0.5 * 1e6 / 2**20
