// Curves over time, drawn by uPlot in the colours of the theme.
import { h, fill } from "./dom.js";
import { time } from "./format.js";

const { uPlot } = globalThis;
const charts = new Set();

/** Return a colour of the theme. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Return `colour` with another opacity. */
export function faded(value, alpha) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

/** Return `value` as it looks on a card at this opacity: what is drawn over others must hide them. */
export function tinted(value, alpha) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const card = parts(colour("card"));
  return `rgb(${parts(value).map((each, i) => Math.round(each * alpha + card[i] * (1 - alpha))).join()})`;
}

document.addEventListener("themechange", () => charts.forEach((each) => each.draw()));

/** Values that hold from their time until the next one. */
export const stepped = uPlot?.paths.stepped({ align: 1 });

const HOUR = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

const SECOND = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

function timeLabels(_, splits, _axis, _space, step) {
  const clock = step < 60 ? SECOND : HOUR;
  let day = null;
  return splits.map((s) => {
    const date = new Date(s * 1000);
    const same = DAY.format(date) === day;
    day = DAY.format(date);
    return same ? clock.format(date) : `${clock.format(date)}\n${day}`;
  });
}

/** A chart in `place`, which is drawn again when its size or the theme changes. */
export class Chart {
  /**
   * `options()` returns `{unit, series, bands, over, under, range, right, rightPadding, format}` in the colours of now; `series` are
   * uPlot's, without that of time; `right` is the scale that has its axis there; `under` and `over` draw on the canvas before and after the curves.
   */
  constructor(place, options) {
    this.place = fill(place);
    this.options = options;
    this.plot = null;
    this.data = null;
    this.size = new ResizeObserver(() => this.resize());
    this.size.observe(place);
    charts.add(this);
  }

  /** Show `data`: times in seconds, then the values of each series. */
  show(data, summary) {
    this.data = data;
    this.place.setAttribute("role", "img");
    this.place.setAttribute("aria-label", summary);
    if (this.plot) this.plot.setData(data);
    else this.draw();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.place;
    if (this.plot && width && (this.plot.width !== width)) this.plot.setSize({ width, height: this.height(height) });
  }

  height(all) { return Math.max(120, all - (this.wanted.legend === false || innerWidth <= 560 ? 0 : 34)); }

  /** Draw anew, in the colours of now. */
  draw() {
    if (!this.data || !this.place.isConnected) return;
    const wanted = this.wanted = this.options();
    this.plot?.destroy();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const show = wanted.format ?? ((value) => value);
    const { clientWidth: width, clientHeight: height } = this.place;
    this.plot = new uPlot({
      width, height: this.height(height),
      padding: [12, wanted.rightPadding ?? 28, 0, 0], // half of the widest label of a time, which may be that of the edge
      legend: { show: wanted.legend !== false, live: true },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
      scales: { ...wanted.scales, x: { time: true, ...(wanted.x ?? {}) }, y: { range: wanted.range ?? ((_, low, high) => [Math.min(0, low ?? 0), (high ?? 0) > 0 ? high * 1.1 : 1]) } },
      axes: [
        { ...axis, size: 38, space: 64, values: timeLabels },
        { ...axis, size: 56, values: (_, values) => values.map((value) => show(value)) },
        ...(wanted.right ? [{ ...axis, size: 56, side: 1, scale: wanted.right, grid: { show: false } }] : []),
      ],
      series: [{ label: "", value: (_, s) => (s === null || s === undefined ? "" : time(s * 1000)) }, ...wanted.series.map((each) => ({
        spanGaps: false, points: { show: false }, value: (_, value) => (value === null || value === undefined ? "" : `${show(value)} ${wanted.unit}`), ...each,
      }))],
      bands: wanted.bands,
      hooks: {
        drawClear: wanted.under ? [(plot) => clipped(plot, wanted.under)] : [],
        draw: wanted.over ? [(plot) => clipped(plot, wanted.over)] : [],
      },
    }, this.data, this.place);
  }
}

function clipped(plot, work) {
  const { left, top, width, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.beginPath();
  plot.ctx.rect(left, top, width, height);
  plot.ctx.clip();
  work(plot, plot.ctx);
  plot.ctx.restore();
}

/** Fill the time between two instants, in seconds, over the whole height. */
export function shade(plot, from, to, fillStyle) {
  const left = plot.valToPos(from, "x", true);
  const right = plot.valToPos(to, "x", true);
  plot.ctx.fillStyle = fillStyle;
  plot.ctx.fillRect(left, plot.bbox.top, Math.max(1, right - left), plot.bbox.height);
}

/** Draw a line at an instant, in seconds, with a word beside it. */
export function mark(plot, s, text, stroke) {
  const { ctx, bbox } = plot;
  const x = Math.round(plot.valToPos(s, "x", true));
  const ratio = devicePixelRatio || 1;
  ctx.strokeStyle = ctx.fillStyle = stroke;
  ctx.lineWidth = ratio;
  ctx.setLineDash([4 * ratio, 3 * ratio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  const fits = x + 5 * ratio + ctx.measureText(text).width < bbox.left + bbox.width;
  ctx.textAlign = fits ? "left" : "right";
  ctx.fillText(text, x + (fits ? 5 : -5) * ratio, bbox.top + 12 * ratio);
}

/** Return a bar of `value` of `most`, with its meaning in words. */
export function meter(value, most, words, kind = "") {
  const share = most > 0 ? Math.min(1, Math.max(0, value / most)) : 0;
  return h("svg:svg", { class: `meter ${kind}`, viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": words },
    h("svg:rect", { width: 100, height: 4, class: "back" }), h("svg:rect", { width: share * 100, height: 4, class: "front" }));
}

/** Return a line through values, of which some may be null, with its meaning in words. */
export function spark(values, words) {
  const known = values.filter((each) => each !== null);
  const [least, most] = [Math.min(...known), Math.max(...known, Math.min(...known) + 10)];
  const points = (part) => part.map(([at, value]) => `${((at + 0.5) / values.length * 100).toFixed(1)},${(18 - (value - least) / (most - least) * 16).toFixed(1)}`).join(" ");
  const parts = [];
  values.forEach((value, at) => {
    if (value === null) return;
    if (at && values[at - 1] !== null) parts.at(-1).push([at, value]); else parts.push([[at, value]]);
  });
  return h("svg:svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": words },
    h("svg:title", {}, words), parts.map((part) => h("svg:polyline", { points: points(part.length > 1 ? part : [part[0], [part[0][0] + 0.9, part[0][1]]]) })));
}
