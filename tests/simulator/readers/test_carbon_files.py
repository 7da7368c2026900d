"""Carbon files: units, signals, gaps and forecasts as issued, on files of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.domain.carbon import Signal
from services.simulator.raw import TraceFormatError
from services.simulator.readers.carbon import read_carbon
from services.simulator.workload import ForecastKind

UNIT = "gCO₂eq/kWh"
EM_HEAD = (
    f"Datetime (UTC),Zone id,Carbon intensity {UNIT} (direct),Carbon intensity {UNIT} (Life cycle),Data estimated\n"
)
EM = EM_HEAD + "".join(f"2023-01-01 {hour:02d}:00:00,SE,{hour},{100 + hour},{hour == 3}\n" for hour in range(24))


def write(folder: Path, text: str) -> Path:
    file = folder / "grid.csv"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(("signal", "first"), [("direct", 0.0), ("lifecycle", 100.0)])
def test_electricity_maps_has_two_families(tmp_path: Path, signal: str, first: float) -> None:
    trace = read_carbon(write(tmp_path, EM), signal=signal)

    assert (trace.zone, trace.curve.intensity_gco2_per_kwh[0], len(trace.curve.times_s)) == ("SE", first, 24)
    assert trace.curve.end_s - trace.curve.start_s == 86_400
    assert "1 values are estimates of the provider (4.2 %)" in trace.notes


def test_electricity_maps_newer_column_names(tmp_path: Path) -> None:
    text = EM.replace("Carbon intensity", "Carbon Intensity").replace("(Life cycle)", "(LCA)").replace("id", "ID", 1)

    assert read_carbon(write(tmp_path, text), signal="lifecycle").curve.intensity_gco2_per_kwh[0] == 100.0
    with pytest.raises(TraceFormatError, match="no marginal intensity"):
        read_carbon(write(tmp_path, text), signal="marginal")


@pytest.mark.parametrize(
    ("text", "signal", "expected"),
    [
        ("datetime,carbon_intensity_production_avg,Index\n2021-01-01T00:00Z,184.0,low\n", "direct", 184.0),
        ("oootime,Caiso_North\n2023-06-08 00:00:00,425.5\n", "marginal", 425.5),
        ("point_time,value\n2023-06-08T00:00:00Z,1000\n", "marginal", 453.59237),
        ("datetime_beginning_utc,pnode_name,marginal_co2_rate\n2023-06-08T00:00:00,A,-1000\n", "marginal", -453.59237),
        ("Time,Carbon Intensity\n2019-12-20 00:00:00,218.3\n", "lifecycle", 218.3),
        ("time,intensity\n1577836800,218.3\n", "direct", 218.3),
        (",UTC time,carbon_intensity,wind\n0,2021-07-01 00:00:00+00:00,334.8,1\n", "direct", 334.8),
    ],
)
def test_other_sources_come_in_grams(tmp_path: Path, text: str, signal: str, expected: float) -> None:
    trace = read_carbon(write(tmp_path, text), signal=signal)

    assert trace.curve.intensity_gco2_per_kwh.tolist() == pytest.approx([expected])


def test_signals_are_never_mixed(tmp_path: Path) -> None:
    file = write(tmp_path, "oootime,Caiso_North\n2023-06-08 00:00:00,425.5\n")

    with pytest.raises(TraceFormatError, match="measures marginal, not average_direct"):
        read_carbon(file)


def test_a_file_of_several_zones_wants_a_name(tmp_path: Path) -> None:
    file = write(tmp_path, EM + "2023-01-02 00:00:00,GB,1,2,False\n")

    with pytest.raises(TraceFormatError, match="several zones"):
        read_carbon(file)


def test_gaps_and_missing_values_are_reported_and_long_ones_refused(tmp_path: Path) -> None:
    rows = EM.splitlines()
    rows[5] = rows[5].replace(",4,", ",,")
    trace = read_carbon(write(tmp_path, "\n".join([*rows[:10], rows[9], rows[9].replace(",8,", ",9,"), *rows[12:]])))

    assert "gap of 2.00 h after 2023-01-01T03:00:00: the value before it held over it" in trace.notes
    assert "gap of 3.00 h after 2023-01-01T08:00:00: the value before it held over it" in trace.notes
    assert any("no value (line 6)" in note for note in trace.notes)
    assert "1 row occurs twice and counts once (line 11)" in trace.notes
    assert "dropped 1: a time that occurred before (line 12)" in trace.notes
    assert trace.curve.at(trace.curve.start_s + 4.5 * 3600) == 3.0
    with pytest.raises(TraceFormatError, match="too long to bridge"):
        read_carbon(write(tmp_path, EM + "2023-01-04 00:00:00,SE,1,2,False\n"))


def test_nothing_is_made_up_beyond_the_data(tmp_path: Path) -> None:
    file = write(tmp_path, EM)

    with pytest.raises(TraceFormatError, match="known only from 2023-01-01T00:00:00 to 2023-01-02T00:00:00;"):
        read_carbon(file, start="2023-01-01", days=2)
    with pytest.raises(TraceFormatError, match="is known only from"):
        read_carbon(file, start="2022-12-31", days=0.5)


def test_the_day_before_the_start_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path, EM)
    trace = read_carbon(file, start="2023-01-01T12:00:00", days=0.25)

    assert (trace.curve.intensity_gco2_per_kwh[0], trace.curve.intensity_gco2_per_kwh[-1]) == (0.0, 17.0)


def test_forecasts_are_blocks_in_order_of_rows(tmp_path: Path) -> None:
    rows = [
        f"2023-01-0{day + hour // 24} {hour % 24:02d}:00,{100 * day + hour}" for day in (1, 2) for hour in range(48)
    ]
    file = tmp_path / "forecast.csv"
    file.write_text("\n".join(["Datetime (UTC),Carbon Intensity Forecast", *rows, rows[0]]), encoding="utf-8")
    trace = read_carbon(write(tmp_path, EM), forecast=file)

    assert trace.forecast is ForecastKind.FILE
    assert trace.issued is not None
    assert trace.issued.intensity_gco2_per_kwh.shape == (1, 48)
    assert trace.issued.intensity_gco2_per_kwh[0, 24] == 124.0
    assert any("an issue without its 48 values" in note for note in trace.notes)
    with pytest.raises(TraceFormatError, match="do not cover average_lifecycle"):
        read_carbon(write(tmp_path, EM), forecast=file, signal="lifecycle")


def test_bundled_zones_have_both_signals() -> None:
    for zone, direct, lifecycle in (("US-CAL-CISO", 193.7, 260.8), ("SE", 3.9, 23.7), ("PL", 688.6, 747.4)):
        for signal, mean in ((Signal.AVERAGE_DIRECT, direct), (Signal.AVERAGE_LIFECYCLE, lifecycle)):
            trace = read_carbon(zone, start="2023-01-01", days=365, signal=signal)
            assert trace.curve.mean(trace.curve.times_s[24], trace.curve.end_s) == pytest.approx(mean, abs=0.06)
            assert len(trace.curve.times_s) == 366 * 24
    with pytest.raises(TraceFormatError, match="not marginal"):
        read_carbon("SE", signal="marginal")


def test_an_unknown_zone_is_an_unknown_file() -> None:
    with pytest.raises(TraceFormatError, match="there is no file"):
        read_carbon("Atlantis")


def test_bundled_zones_have_the_forecasts_of_their_time() -> None:
    trace = read_carbon("GB", start="2023-08-08", days=2, forecast="issued")

    assert trace.issued is not None
    assert trace.issued.intensity_gco2_per_kwh.shape[1] == 96
    assert trace.issued.issued_s[0] < trace.curve.start_s < trace.issued.issued_s[-1] < trace.curve.end_s
    with pytest.raises(TraceFormatError, match="direct intensity"):
        read_carbon("GB", signal="lifecycle", forecast="issued")


def test_a_zone_of_ones_own_has_no_bundled_forecasts(tmp_path: Path) -> None:
    file = tmp_path / "home.csv"
    file.write_text("time,intensity\n2023-01-01T00:00Z,100\n2023-01-01T01:00Z,200\n", encoding="utf-8")

    with pytest.raises(TraceFormatError, match="name a file of them"):
        read_carbon(file, forecast="issued")


@pytest.mark.parametrize(
    ("header", "scale"),
    [
        *(("gCO2/kWh", 1.0), ("gCO₂eq/kWh", 1.0), ("g_per_kwh", 1.0), ("carbon intensity [g/kWh]", 1.0)),
        *(("kgCO2_per_kWh", 1_000.0), ("kg CO2e / MWh", 1.0), ("lbs_co2_per_mwh", 0.45359237), ("lb/MWh", 0.45359237)),
        *(("tCO2/MWh", 1_000.0), ("t/GWh", 1.0), ("metric tons CO2eq per MWh", 1_000.0), ("tonnes_per_mwh", 1_000.0)),
        *(("lbCO2perkWh", 453.59237), ("Pounds per kWh", 453.59237), ("kgCO2eq/GWh", 0.001), ("CO2 (kg/kWh)", 1_000.0)),
        ("kgCO\udce2\udc82\udc82/kWh", 1_000.0),
    ],
)
@pytest.mark.parametrize("first", ["time", "oootime"])
def test_the_unit_that_a_column_states_is_converted(tmp_path: Path, header: str, scale: float, first: str) -> None:
    signal = "marginal" if first == "oootime" else "direct"
    file = tmp_path / "grid.csv"
    file.write_bytes(f"{first},{header}\n2023-01-01T00:00Z,2\n".encode(errors="surrogateescape"))

    trace = read_carbon(file, signal=signal)

    assert trace.curve.intensity_gco2_per_kwh.tolist() == pytest.approx([2 * scale])
    assert any("converted to gCO2/kWh" in note for note in trace.notes) == (scale != 1.0)
    assert not any("taken as gCO2/kWh" in note for note in trace.notes)


@pytest.mark.parametrize("header", ["intensity", "carbon_gco2", "co2/kWh", "Caiso_North", "MT", "gas"])
def test_a_column_without_a_unit_is_taken_as_grams_and_says_so(tmp_path: Path, header: str) -> None:
    trace = read_carbon(write(tmp_path, f"time,{header}\n2023-01-01T00:00Z,218\n"))

    assert trace.curve.intensity_gco2_per_kwh.tolist() == [218.0]
    assert f"the column {header!r} states no unit: taken as gCO2/kWh" in trace.notes


@pytest.mark.parametrize(
    "header", ["kgCO2/MMBtu", "tons_co2_per_mwh", "kg_co2", "co2 per MWh", "gCO2/MJ", "mg/kWh", "lb", "renewable %"]
)
def test_another_unit_is_refused(tmp_path: Path, header: str) -> None:
    with pytest.raises(TraceFormatError, match="a unit that is not understood; give g, kg, lb or t per kWh"):
        read_carbon(write(tmp_path, f"time,{header}\n2023-01-01T00:00Z,218\n"))


def test_what_no_grid_has_is_dropped_and_named(tmp_path: Path) -> None:
    values = (100, -50, -9999, "-999.0", 1e15, "1e400", 100_000, 99)
    text = "time,gCO2/kWh\n" + "".join(f"2023-01-01T{at:02}:00Z,{each}\n" for at, each in enumerate(values))
    trace = read_carbon(write(tmp_path, text))

    assert trace.curve.intensity_gco2_per_kwh.tolist() == [100.0, 100_000.0, 99.0]
    assert [note for note in trace.notes if note.startswith("dropped")] == [
        "dropped 2: a number that stands for no value (line 4, 5)",
        "dropped 1: an average intensity below 0 (line 3)",
        "dropped 1: beyond 100,000 gCO2/kWh, as no grid is (line 6)",
        "dropped 1: no value (line 7)",
    ]
    assert read_carbon(write(tmp_path, text), signal="marginal").curve.intensity_gco2_per_kwh[1] == -50.0


def test_the_bound_is_of_grams_and_the_sentinel_of_what_is_written(tmp_path: Path) -> None:
    text = "time,lb/kWh\n2023-01-01T00:00Z,220\n2023-01-01T01:00Z,221\n2023-01-01T02:00Z,-9999\n"
    trace = read_carbon(write(tmp_path, text.replace("lb/kWh", "lb/MWh")), signal="marginal")
    assert "dropped 1: a number that stands for no value (line 4)" in trace.notes

    trace = read_carbon(write(tmp_path, text), signal="marginal")
    assert "dropped 2: beyond 100,000 gCO2/kWh, as no grid is (line 3, 4)" in trace.notes


@pytest.mark.parametrize(("value", "is_odd"), [(0.4, True), (3.9, False), (900, False), (2_500, True)])
def test_a_median_that_few_grids_have_deserves_a_note(tmp_path: Path, value: float, is_odd: bool) -> None:
    trace = read_carbon(write(tmp_path, f"time,g/kWh\n2023-01-01T00:00Z,{value}\n"))

    assert any("is the unit the right one?" in note for note in trace.notes) == is_odd


def test_moments_may_be_seconds_or_milliseconds_and_nothing_else(tmp_path: Path) -> None:
    text = "time,g/kWh\n{},200\n{},201\n"
    seconds = read_carbon(write(tmp_path, text.format(1692057600, 1692061200)))
    milliseconds = read_carbon(write(tmp_path, text.format(1692057600000, 1692061200000)))
    assert milliseconds.curve.times_s.tolist() == seconds.curve.times_s.tolist() == [1692057600.0, 1692061200.0]

    for other in ("1692057600000000", "202308150000", "20230815000000", "nan"):
        with pytest.raises(TraceFormatError, match="time is a number of neither seconds nor milliseconds"):
            read_carbon(write(tmp_path, text.format(other, other)))


def test_an_issue_with_a_bad_row_is_dropped_row_by_row(tmp_path: Path) -> None:
    hours = [(day, at) for day in (1, 2, 3) for at in range(36)]
    rows = [f"2023-01-0{day + at // 24} {at % 24:02d}:00,{100 * day + at}" for day, at in hours]
    rows[40] = "2023-01-02 04:00,?"
    file = tmp_path / "forecast.csv"
    file.write_text("\n".join(["Datetime (UTC),Carbon Intensity Forecast", *rows]), encoding="utf-8")

    trace = read_carbon(write(tmp_path, EM), forecast=file)

    assert "forecast.csv: read as issued forecasts; 72 of 108 rows kept" in trace.notes
    assert any(note.startswith("dropped 35: an issue without its 36 values") for note in trace.notes)
    assert "dropped 1: Carbon Intensity Forecast is not a number (line 42)" in trace.notes
