from jaxzero._cli.bench.table import table


def test_columns_are_aligned_and_floats_short() -> None:
    rows = [
        {"how": "jaxzero", "ms": 1.0, "ranks": 8},
        {"how": "a rival", "ms": 1234.5678, "ranks": 8},
    ]
    assert table(rows) == ("how      ms    ranks\njaxzero  1     8\na rival  1235  8")
