// A job's life line: the states it was in, and the intensity of the grid meanwhile.
import { get } from "./api.js";
import { Chart, colour, faded, mark, shade, stepped } from "./charts.js";
import { fill, h } from "./dom.js";
import { words } from "./format.js";

const COLOURS = { queued: "warn", held: "idle", starting: "info", running: "good", preempting: "info" };
const STATES = new Set([...Object.keys(COLOURS), "succeeded", "failed", "cancelled"]);
const s = (instant) => new Date(instant).getTime() / 1000;
const SHORTEST_S = 60;

/** Return `{state, from, to}` in seconds, from the events of a job. */
export function periods(job, events, now) {
  const found = [];
  let open = null;
  for (const event of events) {
    const name = event.type.replace("job.", "");
    const state = name === "submitted" ? event.data.state ?? "queued" : name;
    if (!STATES.has(state)) continue;
    if (open) found.push({ ...open, to: s(event.at) });
    open = COLOURS[state] ? { state, from: s(event.at) } : null;
  }
  if (open) found.push({ ...open, to: job.ended_at ? s(job.ended_at) : now });
  return found;
}

/** The chart of one job. */
export class LifeLine {
  constructor(place, legend, note) {
    Object.assign(this, { legend, note, spans: [], job: null, now: 0 });
    this.chart = new Chart(place, () => ({
      unit: "gCO₂/kWh", format: (value) => Math.round(value), legend: false, rightPadding: 68, x: { range: () => this.range }, // as wide as the chart below it, which has an axis there
     
      range: (_, low, high) => [Math.max(0, Math.floor((low ?? 0) * 0.9 / 20) * 20), Math.ceil(((high ?? 100) * 1.05) / 20) * 20],
      series: [
        { label: "intensity", stroke: colour("text"), width: 2, paths: stepped },
        { label: "forecast", stroke: colour("info"), width: 2, dash: [6, 4], paths: stepped },
      ],
      under: (plot) => {
        for (const { state, from, to } of this.spans) shade(plot, from, to, faded(colour(COLOURS[state]), state === "held" ? 0.18 : 0.26));
      },
      over: (plot) => {
        if (!this.job.ended_at) mark(plot, this.now, "now", colour("muted"));
        if (this.job.state === "queued" && this.job.expected_start_at) mark(plot, s(this.job.expected_start_at), "expected start", colour("warn"));
        if (this.expectedEnd) mark(plot, this.expectedEnd, "expected end", colour("good"));
      },
    }));
  }

  /** Show a job by its events; `zone` is the grid's, `expectedEnd` an instant or null. */
  async show(job, events, zone, expectedEnd) {
    const now = Date.now() / 1000;
    const from = s(job.submitted_at);
    const known = job.ended_at ? s(job.ended_at) : now;
    const ahead = Math.max(now, job.expected_start_at ? s(job.expected_start_at) : 0, expectedEnd ? s(expectedEnd) : 0);
    const until = job.ended_at ? known : Math.max(ahead, now + (now - from) * 0.15);
    const length = Math.max(SHORTEST_S, until - from);
    Object.assign(this, { job, now, spans: periods(job, events, now), expectedEnd: expectedEnd ? s(expectedEnd) : null });
    this.range = [from - length * 0.03, from + length * 1.03];
    const data = await this.intensities(zone, ...this.range, job.ended_at !== null);
    const states = [...new Set(this.spans.map((each) => each.state))];
    fill(this.legend, states.map((state) => h("span", { class: `badge ${state}` }, state === "queued" ? "waiting" : words(state))));
    this.chart.show(data, `Intensity of ${zone} while the job was ${states.map(words).join(", ") || "submitted"}`);
    if (events.length) fill(this.note, `The curve is the carbon intensity of ${zone} in gCO₂/kWh${job.ended_at ? "" : ", dashed where it is a forecast"}; the shading is the job's state.`);
  }

  async intensities(zone, from, until, isOver) {
    const path = `/v1/carbon/${encodeURIComponent(zone)}`;
    const now = Date.now() / 1000;
    let points;
    if (isOver && now - from > 86_400) {
      const iso = (seconds) => new Date(seconds * 1000).toISOString();
      points = (await get(`${path}/history`, { start: iso(from), end: iso(Math.min(now, until)) })).points.map((each) => ({ ...each, kind: "measured" }));
    } else {
      points = (await get(`${path}/outlook`, { past_s: Math.max(1, now - from), ahead_s: Math.max(1, until - now), clock: "real" })).points;
    }
    const rows = [[], [], []];
    let last = null;
    for (const each of points.filter(({ start_at: begins }) => s(begins) < until)) {
      const isKnown = each.kind === "measured" || each.kind === "held";
      if (last && last.isKnown && !isKnown) rows[1][rows[1].length - 1] ??= last.value;
      rows[0].push(s(each.start_at));
      rows[1].push(isKnown ? each.gco2_per_kwh : null);
      rows[2].push(isKnown ? null : each.gco2_per_kwh);
      last = { isKnown, value: each.gco2_per_kwh };
    }
    if (last) {
      rows[0].push(until); // a curve is drawn between points in view
      rows[1].push(last.isKnown ? last.value : null);
      rows[2].push(last.isKnown ? null : last.value);
    }
    return rows;
  }
}
