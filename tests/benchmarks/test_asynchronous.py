from benchmarks.asynchronous import Taken, goals_of, rows_of


def test_rows_have_spread_ratios_and_sides_that_reached_the_target():
    ddp = [Taken(100.0, 4.0, 0.2, 0.01), Taken(200.0, 8.0, 0.3, None), Taken(300.0, 6.0, 0.1, 0.124)]
    leased = [Taken(150.0, None, 0.4, None), Taken(400.0, 2.5, 0.3, None), Taken(900.0, None, 0.5, None)]
    rows = rows_of({"ddp": ddp, "async, leases": leased})
    assert rows[0] == {
        "side": "ddp",
        "samples_per_second": "200 (100 to 300)",
        "of ddp": 1.0,
        "of sync": None,
        "seconds_to_target": "6.0 (4.0 to 8.0)",
        "reached": "3 of 3",
        "final_loss": "0.200 (0.100 to 0.300)",
        "without a core, %": 12.4,
    }
    assert rows[1]["without a core, %"] is None
    assert rows[1]["of ddp"] == 2.0  # the median of 1.5, 2 and 3: of the same seed
    assert (rows[1]["seconds_to_target"], rows[1]["reached"]) == ("2.5", "1 of 3")
    goals = goals_of({"slow": {"ddp": ddp, "async, leases": leased}, "none": {"ddp": ddp}})
    assert [(goal.value, goal.limit, goal.holds) for goal in goals] == [(2.0, 1.8, True)]
    assert not goals_of({"stalls": {"async": ddp}}), "nothing to compare with"
