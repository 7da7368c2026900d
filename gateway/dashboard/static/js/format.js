// Figures with their units, times in the viewer's zone; what is unknown is said to be.
import { h } from "./dom.js";

export const UNKNOWN = "unknown";
const isUnknown = (value) => value === null || value === undefined || Number.isNaN(value);

/** Return the sign of something unknown. */
export const unknown = () => h("span", { class: "unknown" }, UNKNOWN);

/** Return a number in three significant digits. */
export function digits(value) {
  if (isUnknown(value)) return UNKNOWN;
  const whole = Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3));
  return whole.toLocaleString("en", { maximumFractionDigits: 6 });
}

/** Return what writes a value in the unit that suits it; its `of` returns what writes all values of a column in one. */
function scaled(steps, suffix = "") {
  const stepFor = (most) => steps.find(([from]) => most >= from) ?? steps.at(-1);
  const show = (value, [least, unit, size = least]) => (isUnknown(value) ? UNKNOWN : `${digits(value / size)} ${unit}${suffix}`);
  const one = (value) => show(value, stepFor(Math.abs(value)));
  one.of = (values) => {
    const step = stepFor(Math.max(0, ...values.filter((each) => !isUnknown(each)).map(Math.abs)));
    return (value) => show(value, step);
  };
  return one;
}

export const power = scaled([[1e6, "MW"], [1e3, "kW"], [1, "W"]]);
export const energy = scaled([[3.6e12, "GWh"], [3.6e9, "MWh"], [3.6e6, "kWh"], [3.6e3, "Wh"]]);
export const carbon = scaled([[1e6, "t"], [1e3, "kg"], [1, "g"], [1e-3, "mg"]], " CO₂");
export const intensity = (value) => (isUnknown(value) ? UNKNOWN : `${Math.round(value)} gCO₂/kWh`);
export const gpuHours = scaled([[360, "GPU h", 3600], [1, "GPU s"]]);
/** Return how far a value is from a base, as a share of it; null without a base above 0: more would be shown as less. */
export const relativeChange = (value, base) => (base > 0 && !isUnknown(value) ? value / base - 1 : null);
export const percent = (share) => (isUnknown(share) ? UNKNOWN : `${digits(share * 100)} %`);
/** Return by how much a figure can be off, as a share of it; nothing where that is not known. */
export const within = (width, value) => (width && value ? h("span", { class: "sub" }, `± ${percent(width / Math.abs(value))}`) : null);
export const count = (value) => (isUnknown(value) ? UNKNOWN : value.toLocaleString("en"));
/** Whether the greenest time of an estimate is now. */
export const startsNow = ({ now, greenest }) => Boolean(now) && now.starts_at === greenest?.starts_at;
/** Return the past days as simulations ask for them; a period that is longer, whatever clocks differ by, ends now. */
export const pastDays = (days, nowMs) => ({ start: new Date(nowMs - days * 86_400_000).toISOString(), days: days + 1 });
/** Return a number of things: "1 restart", "2 restarts". */
export const counted = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
export const clock = (mhz) => (isUnknown(mhz) ? UNKNOWN : `${mhz.toLocaleString("en")} MHz`);

/** Return a length of time in its two largest units. */
export function duration(s) {
  if (isUnknown(s)) return UNKNOWN;
  if (s < 1 && s > 0) return `${digits(s * 1000)} ms`;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let left = Math.round(s);
  const out = [];
  for (const [unit, size] of parts) {
    const n = Math.floor(left / size);
    left -= n * size;
    if (n || (out.length && out.length < 2)) out.push(`${n} ${unit}`);
    if (out.length === 2) break;
  }
  return out.join(" ").replace(/ 0 (h|min|s)$/, "") || "0 s";
}

const SHORT = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const LONG = { ...SHORT, year: "numeric", second: "2-digit", timeZoneName: "short" };
const HOUR = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };

const show = (date, how) => new Intl.DateTimeFormat("en-GB", how).format(date).replace(",", "");

/** Return a time of day if it is today, else with its date. */
export function time(value) {
  const date = new Date(value);
  return show(date, date.toDateString() === new Date().toDateString() ? HOUR : SHORT);
}

/** Return how long ago, or how far ahead, a time is. */
export function ago(value) {
  const s = (Date.now() - new Date(value)) / 1000;
  if (Math.abs(s) < 5) return "now";
  return s > 0 ? `${duration(s).split(" ").slice(0, 2).join(" ")} ago` : `in ${duration(-s).split(" ").slice(0, 2).join(" ")}`;
}

/** Return a time as an element: short to read, complete to point at. */
export function at(value, words = time) {
  if (!value) return unknown();
  return h("time", { datetime: value, title: show(new Date(value), LONG) }, words(value));
}

/** Return a figure as an element that keeps its exact value, null for unknown. */
export function figure(value, words, properties = {}) {
  if (isUnknown(value)) return unknown();
  return h("data", { value: String(value), ...properties }, words(value));
}

/** Return a code of the API in words: `waiting_for_gpus` becomes "waiting for gpus". */
export const words = (code) => (code ? code.replaceAll("_", " ").replace(/\bgpus?\b/g, (gpu) => gpu.replace("gpu", "GPU")) : "");

/** What people type for a job's id; null if it was accepted before jobs had numbers. */
export const numberOf = (job) => (job.number ? `#${job.number}${isUnknown(job.array_index) ? "" : `.${job.array_index}`}` : null);

/** Return a state as a badge. */
export const badge = (state, text = words(state)) => h("span", { class: `badge ${state}` }, text);
