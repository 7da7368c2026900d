// The front of carbon against time: which choices are not beaten in both.
import { h } from "./dom.js";
import { carbon, duration } from "./format.js";

/** Return the rows `{time, grams}` that no other row beats in one without losing in the other, by time. */
export function front(rows) {
  let least = Infinity;
  return rows.toSorted((a, b) => a.time - b.time || a.grams - b.grams).filter((row) => {
    if (row.grams >= least) return false;
    least = row.grams;
    return true;
  });
}

const WIDTH = 720;
const HEIGHT = 300;
const EDGE = { left: 78, right: 130, top: 16, bottom: 46 };

function scale(values, from, to) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  const [first, last] = [Math.max(0, low - room), high + room];
  return { at: (value) => from + ((value - first) / (last - first)) * (to - from), ticks: [0, 1, 2, 3].map((i) => first + ((i + 0.5) / 4) * (last - first)) };
}

/** Return the rows as points, those of the front joined. */
export function scatter(rows, best) {
  const x = scale(rows.map((row) => row.time), EDGE.left, WIDTH - EDGE.right);
  const y = scale(rows.map((row) => row.grams), HEIGHT - EDGE.bottom, EDGE.top);
  const line = best.map((row, i) => `${i ? "L" : "M"}${x.at(row.time).toFixed(1)} ${y.at(row.grams).toFixed(1)}`).join("");
  const taken = [];
  const free = (row) => { // labels that would lie on each other move down
    let place = y.at(row.grams) + 4;
    while (taken.some(([left, top]) => Math.abs(left - x.at(row.time)) < 110 && Math.abs(top - place) < 13)) place += 13;
    taken.push([x.at(row.time), place]);
    return place;
  };
  return h("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Carbon against mean time to end of ${rows.length} choices; on the front: ${best.map((row) => row.label).join(", ")}` },
    x.ticks.map((each) => h("svg:g", {}, h("svg:line", { x1: x.at(each), x2: x.at(each), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "grid" }), h("svg:text", { x: x.at(each), y: HEIGHT - EDGE.bottom + 18, "text-anchor": "middle" }, duration(each)))),
    y.ticks.map((each) => h("svg:g", {}, h("svg:line", { y1: y.at(each), y2: y.at(each), x1: EDGE.left, x2: WIDTH - EDGE.right, class: "grid" }), h("svg:text", { x: EDGE.left - 8, y: y.at(each) + 4, "text-anchor": "end" }, carbon(each).replace(" CO₂", "")))),
    h("svg:text", { x: (EDGE.left + WIDTH - EDGE.right) / 2, y: HEIGHT - 6, "text-anchor": "middle", class: "axis" }, "mean time from submission to end"),
    h("svg:text", { x: 12, y: HEIGHT / 2, transform: `rotate(-90 12 ${HEIGHT / 2})`, "text-anchor": "middle", class: "axis" }, "CO₂"),
    h("svg:path", { d: line, class: "front-line" }),
    rows.toSorted((a, b) => a.grams - b.grams).reverse().map((row) => h("svg:g", { class: best.includes(row) ? "best" : "" },
      h("svg:circle", { cx: x.at(row.time), cy: y.at(row.grams), r: 5 }, h("svg:title", {}, `${row.label}: ${carbon(row.grams)}, ${duration(row.time)}`)),
      h("svg:text", { x: x.at(row.time) + 9, y: free(row), class: "label" }, row.label))));
}
