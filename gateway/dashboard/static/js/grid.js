// The grid's intensity over time, and the greenest part of what is ahead.
import { Chart, colour, faded, mark, shade, stepped } from "./charts.js";
import { intensity } from "./format.js";

const s = (instant) => new Date(instant).getTime() / 1000;

/**
 * Return the window of `hours` of grid time ahead of `now` in which the mean forecast is lowest, as
 * `{from, to, mean}` in seconds and gCO2/kWh; null where the forecast is shorter.
 */
export function greenest(outlook, hours) {
  const now = s(outlook.now);
  const length = (hours * 3600) / outlook.time_scale;
  const steps = outlook.points.map((each) => [Math.max(now, s(each.start_at)), s(each.end_at), each.gco2_per_kwh])
    .filter(([from, to]) => to > from);
  if (!steps.length || steps.at(-1)[1] - now < length) return null;
  // The mean is linear between starts at which an edge of the window meets an edge of a step: one of these is lowest.
  const last = steps.at(-1)[1] - length;
  const starts = steps.flatMap(([from, to]) => [from, to - length]).filter((from) => from >= now && from <= last);
  let best = null;
  for (const from of starts.sort((a, b) => a - b)) {
    let sum = 0;
    for (const [begin, end, value] of steps) sum += Math.max(0, Math.min(end, from + length) - Math.max(begin, from)) * value;
    const mean = sum / length;
    if (!best || mean < best.mean - 1e-9) best = { from, to: from + length, mean };
  }
  return best;
}

/** Return the step of an outlook that applies now. */
export function current(outlook) {
  const now = s(outlook.now);
  return outlook.points.find((each) => s(each.start_at) <= now && now < s(each.end_at)) ?? null;
}

/** Return an outlook as columns: times, what is known, what is predicted, and its band. */
export function columns(outlook) {
  const rows = [[], [], [], [], []];
  let before = null;
  for (const each of outlook.points) {
    const known = each.kind === "measured" || each.kind === "held";
    if (before && before.known && !known) push(s(each.start_at), before.value, before.value, null, null);
    const band = !known && each.p10 !== null && each.p90 !== null;
    push(s(each.start_at), known ? each.gco2_per_kwh : null, known ? null : each.gco2_per_kwh,
      band ? each.p10 : null, band ? each.p90 : null);
    before = { known, value: each.gco2_per_kwh, band: band ? [each.p10, each.p90] : [null, null] };
  }
  const end = s(outlook.points.at(-1).end_at);
  push(end, before.known ? before.value : null, before.known ? null : before.value, ...before.band);
  return rows;
  function push(...values) { values.forEach((value, i) => rows[i].push(value)); }
}

/** A chart of the intensity: known, predicted with its band, the present, the greenest window. */
export class GridChart {
  constructor(place) {
    this.outlook = null;
    this.window = null;
    this.chart = new Chart(place, () => ({
      unit: "gCO₂/kWh",
      format: (value) => Math.round(value),
      range: (_, low, high) => [Math.max(0, Math.floor((low ?? 0) * 0.85 / 20) * 20), Math.ceil(((high ?? 100) * 1.08) / 20) * 20],
      series: [
        { label: "measured", stroke: colour("text"), width: 2, paths: stepped },
        { label: "forecast", stroke: colour("info"), width: 2, dash: [6, 4], paths: stepped },
        { label: "1 in 10 below", stroke: faded(colour("info"), 0.35), width: 1, paths: stepped },
        { label: "1 in 10 above", stroke: faded(colour("info"), 0.35), width: 1, paths: stepped },
      ],
      bands: [{ series: [4, 3], fill: faded(colour("info"), 0.16) }],
      under: (plot) => this.window && shade(plot, this.window.from, this.window.to, faded(colour("good"), 0.17)),
      over: (plot) => this.outlook && mark(plot, s(this.outlook.now), "now", colour("muted")),
    }));
  }

  show(outlook, window, hours) {
    Object.assign(this, { outlook, window });
    const now = current(outlook);
    this.chart.show(columns(outlook), `Carbon intensity in ${outlook.zone}: ${intensity(now?.gco2_per_kwh)} now` +
      (window ? `, ${intensity(window.mean)} in the greenest ${hours} hours ahead` : ""));
  }
}
