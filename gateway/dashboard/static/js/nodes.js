// Nodes and their devices: clock, power, slices, health, and what runs there.
import { all, get, send } from "./api.js";
import { meter, spark } from "./charts.js";
import { by, fill, h, reconcile, table } from "./dom.js";
import { ago, at, badge, clock, count, counted, digits, duration, energy, percent, power, unknown, words } from "./format.js";
import { every, live } from "./live.js";
import { confirmed, trying } from "./shell.js";

const form = by("filters");
const open = new Set(location.hash ? [decodeURIComponent(location.hash.slice(1))] : []);
const opened = new Set(open); // by an address: shown once, when it is there
let nodes = [];
let jobs = new Map(); // "node/device" -> jobs
let trends = new Map(); // node -> temperatures of its GPUs in the past day
let room = null; // the largest gangs that could start, by level of the network
let body = null;

const isSlice = (device) => device.parent !== undefined && device.parent !== null;
const place = (node, index) => `${node}/${index}`;

/** Return what is known of each device of a node, slices under their GPU. */
function devicesOf(node) {
  const readings = new Map(node.readings.map((each) => [each.index, each]));
  const health = new Map(node.gpu_health.map((each) => [each.gpu, each]));
  const found = node.devices.filter((each) => !isSlice(each)).map((device) => ({
    device, reading: readings.get(device.index), health: health.get(device.index), slices: [],
    partition: node.partitions.find((each) => each.gpu === device.index), jobs: jobs.get(place(node.id, device.index)) ?? [],
  }));
  const gpus = new Map(found.map((each) => [each.device.index, each]));
  for (const slice of node.devices.filter(isSlice)) {
    const of = jobs.get(place(node.id, slice.index)) ?? [];
    gpus.get(slice.parent)?.slices.push({ slice, reading: readings.get(slice.index), jobs: of });
  }
  return found;
}

function kindOf(each) {
  if (each.health?.cause) return "sick";
  if (each.health?.drained) return "drained";
  if (!each.jobs.length && !each.slices.some((slice) => slice.jobs.length)) return "idle";
  return `used-${1 + Math.min(2, Math.floor((each.reading?.utilization ?? 0) * 3))}`;
}

/** Return the state of a node in a word, and why. */
function stateOf(node) {
  if (node.state === "lost") return ["lost", node.heartbeat_at ? `silent since ${ago(node.heartbeat_at)}` : "never heard"];
  if (node.state === "asleep") return [node.power.state === "waking" ? "waking" : "asleep", words(node.power.reason)];
  if (node.closed) return ["draining", node.closed];
  if (node.measures_only) return ["up", node.engine_node ? `only measures ${node.engine_node}` : "only measures; takes no jobs of ours"];
  if (node.draining) return ["draining", "takes no new work"];
  return ["up", ""];
}

const limitOf = (each) => each.reading?.enforced_limit_w ?? each.reading?.power_limit_w ?? each.device.power_limit_w;
/** Return what the check of a GPU's energy counter found, if it has one. */
function meterOf(reading) {
  const ratio = reading?.counter_ratio ?? null;
  const faults = reading?.meter_faults ? `, ${count(reading.meter_faults)} readings not believed` : "";
  return `${ratio === null ? "" : `, counter ${digits(ratio)} x power`}${faults}`;
}
const heatOf = (reading) => (reading?.temperature_c ? `${Math.round(reading.temperature_c)} °C` : "");

/** Return the course of temperatures over the past day as a line: of one GPU, or of the hottest of a node. */
function heatLine(node, gpu = null) {
  const trend = trends.get(node.id);
  const lines = trend?.gpus.filter((each) => gpu === null || each.gpu === gpu).map((each) => each.temperature_c) ?? [];
  const values = lines.length ? lines[0].map((_, at) => lines.reduce((most, line) => (line[at] === null ? most : Math.max(most ?? line[at], line[at])), null)) : [];
  const known = values.filter((each) => each !== null);
  if (known.length < 2) return null;
  const hours = duration(values.length * trend.step_s);
  return spark(values, `${gpu === null ? "its hottest GPU" : `GPU ${gpu}`}: ${Math.min(...known)} to ${Math.max(...known)} °C in the past ${hours}`);
}

const link = (job) => h("a", { href: `/jobs/${job.id}` }, job.name);
const several = (items) => items.flatMap((each, i) => (i ? [", ", each] : [each]));

const cut = (sizes) => sizes.map((size) => `${size}g`).join(" + ") || "whole";

function deviceRow(node, each) {
  const { device, reading, health } = each;
  const sick = health?.cause ? h("span", { class: "problem" }, `${words(health.cause)}${health.detail ? `: ${health.detail}` : ""}`) : health?.drained ? "out of service" : "well";
  const act = health && !health.lasts ? "resume" : health ? null : "drain";
  const gone = node.state !== "up";
  return [h("tr", {},
    h("td", {}, `GPU ${device.index}`, h("small", {}, device.model)),
    h("td", { class: "number" }, gone || !reading ? unknown() : power(reading.power_w), h("small", {}, `of ${power(limitOf(each))}`, meterOf(reading)), h("small", { class: "heat" }, gone ? "" : heatOf(reading), heatLine(node, device.index))),
    h("td", { class: "number" }, gone || !reading ? unknown() : percent(reading.utilization)),
    h("td", { class: "number" }, gone || !reading?.clock_mhz ? unknown() : clock(reading.clock_mhz), reading?.locked_clock_mhz ? h("small", {}, `locked to ${clock(reading.locked_clock_mhz)}`) : null),
    h("td", { class: "number" }, gone || reading?.memory_used_gib === null || !reading ? unknown() : `${digits(reading.memory_used_gib)} GiB`, h("small", {}, `of ${digits(device.memory_gib)} GiB`)),
    h("td", {}, cut(each.slices.map(({ slice }) => slice.sevenths ?? 7)),
      each.partition && each.partition.state !== "applied" ? h("small", {}, `${cut(each.partition.sizes)} ${words(each.partition.state)}${each.partition.detail ? `: ${each.partition.detail}` : ""}`) : null),
    h("td", { class: "why" }, sick, health?.since ? h("small", {}, "since ", at(health.since)) : null),
    h("td", { class: "name" }, each.jobs.length ? several(each.jobs.map(link)) : "–"),
    h("td", {}, act ? h("button", { type: "button", class: "quiet", "data-focus": `${act}-${device.index}`, onclick: () => change(`/v1/nodes/${node.id}/gpus/${device.index}/${act}`) }, act === "drain" ? "Take out" : "Return") : "")),
  ...each.slices.map(({ slice, reading: part, jobs: there }) => h("tr", { class: "slice" },
    h("td", {}, "\u2003", slice.profile ?? `${slice.sevenths ?? 7}g`),
    h("td", { class: "number" }, part ? power(part.power_w) : unknown(), h("small", {}, "estimated")),
    h("td", { class: "number" }, part ? percent(part.utilization) : unknown()), h("td", {}), h("td", { class: "number" }, `${digits(slice.memory_gib)} GiB`),
    h("td", {}, `${slice.sevenths ?? 7}/7`), h("td", {}), h("td", { class: "name" }, there.length ? several(there.map(link)) : "–"), h("td", {})))];
}

function details(node) {
  const act = (name, text, question) => h("button", { type: "button", "data-focus": name, onclick: async () => {
    if (!question || await confirmed(question, text)) change(`/v1/nodes/${node.id}/${name}`);
  } }, text);
  const lacking = node.protections.filter((each) => !each.holds);
  return h("div", { class: "node-details" },
    h("div", { class: "card-head" },
      h("p", { class: "note" }, `${node.address}, driver ${node.driver}, heartbeat `, node.heartbeat_at ? at(node.heartbeat_at, ago) : unknown(), `, credential ${words(node.credential)}`,
        node.power.wakes || node.power.off_s ? `, woken ${count(node.power.wakes)} times, off for ${duration(node.power.off_s)} (${energy(node.power.estimated_energy_j)} estimated)` : "",
        node.marked_intervals ? h("span", { class: "problem" }, `. ${count(node.marked_intervals)} intervals are not booked as its meters have it`) : "",
        lacking.length ? h("span", { class: "problem" }, `. Jobs are not kept apart by: ${lacking.map((each) => words(each.name)).join(", ")}`) : ""),
      h("div", { class: "buttons" },
        node.draining ? act("resume", "Return to service") : act("drain", "Take out of service", `Take ${node.id} out of service? What runs there goes on; nothing new starts.`),
        node.power.pinned_awake ? act("unpin", "May sleep") : act("pin-awake", "Keep awake"),
        node.state === "asleep" ? act("wake", "Wake") : act("sleep", "Power down", `Power ${node.id} down? It is refused while something runs there.`))),
    table(`Devices of ${node.id}`, [["Device"], ["Power", "number"], ["Utilisation", "number"], ["Clock", "number"], ["Memory", "number"], ["Slices"], ["Health"], ["Runs there"], [""]],
      devicesOf(node).flatMap((each) => deviceRow(node, each))));
}

/** Return a GPU of the map: who holds it leads to the job. */
function square(each) {
  const holders = [...each.jobs, ...each.slices.flatMap((slice) => slice.jobs)];
  const { reading } = each;
  const about = [`GPU ${each.device.index}`, holders.map((job) => job.name).join(", ") || "free",
    reading ? `${power(reading.power_w)} of ${power(limitOf(each))}, ${percent(reading.utilization)}` : "no reading", heatOf(reading)].filter(Boolean).join(": ");
  const look = { class: `gpu ${kindOf(each)}`, title: about };
  return holders.length ? h("a", { ...look, href: `/jobs/${holders[0].id}`, "aria-label": about }) : h("span", { ...look, role: "img", "aria-label": about });
}

/** Return the heading of a zone, with what its nodes draw and have free. */
function zoneRow(zone) {
  const there = nodes.filter((node) => node.zone === zone);
  const sum = (of) => there.reduce((total, node) => total + of(node), 0);
  return h("li", { class: "zone-line" }, h("h2", {}, zone), h("span", { class: "note" }, `${counted(there.length, "node")}, ${count(sum((node) => node.gpus - node.gpus_in_use))} of ${count(sum((node) => node.gpus))} GPUs free, ${power(sum((node) => (node.state === "lost" ? 0 : node.power_w)))}`));
}

/** Return how hot the hottest GPU of a node is, and was over the past day. */
function heatNow(node) {
  const hottest = Math.max(...node.readings.map((each) => each.temperature_c ?? 0));
  return hottest ? h("span", { class: "heat" }, h("span", { class: "sub", title: "its hottest GPU" }, `${Math.round(hottest)} °C`), heatLine(node)) : null;
}

function nodeRow(node) {
  const [state, why] = stateOf(node);
  const devices = devicesOf(node);
  const limit = devices.reduce((sum, each) => sum + limitOf(each), 0);
  const shown = open.has(node.id);
  const models = [...new Set(devices.map((each) => each.device.model))].join(", ");
  const toggle = h("button", { type: "button", class: "toggle quiet", "aria-expanded": String(shown), "data-focus": "toggle", onclick: () => {
    if (shown) open.delete(node.id); else open.add(node.id);
    draw();
  } }, node.id);
  return h("li", { class: "node", id: node.id },
    h("div", { class: "node-line" },
      h("div", { class: "node-name" }, toggle, h("span", { class: "sub" }, `${models} · ${node.zone}`)),
      h("div", {}, badge(state, state === "draining" && node.closed ? "closed" : words(state)), why ? h("span", { class: "sub" }, why) : null),
      h("div", { class: "gpus", role: "group", "aria-label": `${node.gpus_in_use} of ${node.gpus} GPUs in use` }, devices.map(square)),
      h("div", { class: "node-power" }, node.state === "lost" ? unknown() : [power(node.power_w), h("span", { class: "sub" }, ` of ${power(limit)}`), meter(node.power_w, limit, `${power(node.power_w)} of ${power(limit)}`), heatNow(node)])),
    shown ? details(node) : null);
}

function matches(node) {
  const text = form.elements.q.value.trim().toLowerCase();
  if (text && ![node.id, node.zone, ...node.devices.map((each) => each.model)].some((each) => each.toLowerCase().includes(text))) return false;
  switch (form.elements.state.value) {
    case "up": return node.state === "up";
    case "busy": return node.gpus_in_use > 0;
    case "free": return node.state === "up" && !node.draining && node.gpus_in_use < node.gpus;
    case "trouble": return node.state === "lost" || node.closed || node.gpu_health.length > 0 || node.power.state === "failed";
    case "asleep": return node.state === "asleep";
    default: return true;
  }
}

function draw() {
  const shown = nodes.filter(matches);
  const sum = (of) => nodes.reduce((total, node) => total + of(node), 0);
  fill(by("totals"), `${count(nodes.length)} nodes, ${count(sum((node) => node.gpus_in_use))} of ${count(sum((node) => node.gpus))} GPUs in use, ${power(sum((node) => (node.state === "lost" ? 0 : node.power_w)))}${room?.levels.length ? `; largest gang that could start: ${room.levels.map((each) => `${each.level} ${count(each.free)}`).join(", ")}` : ""}`);
  if (!shown.length) {
    body = null;
    return void fill(by("nodes"), h("p", { class: "card empty" }, nodes.length ? "No node matches the filter." : ["No node has registered yet. ", h("code", {}, "wattshift nodes enroll"), " lets one in."]));
  }
  if (!body) body = fill(by("nodes"), h("ul", { class: "nodes" })).firstChild;
  const zones = [...new Set(shown.map((node) => node.zone))];
  const rows = zones.length > 1 ? zones.flatMap((zone) => [{ zone }, ...shown.filter((node) => node.zone === zone)]) : shown;
  reconcile(body, rows, { key: (node) => node.id ?? `zone ${node.zone}`, make: (node) => (node.id ? nodeRow(node) : zoneRow(node.zone)), stamp: (node) => !node.id ? JSON.stringify(nodes.filter((each) => each.zone === node.zone).map((each) => [each.gpus_in_use, Math.round(each.power_w / 10)])) : JSON.stringify([open.has(node.id), stateOf(node), node.gpus_in_use, Math.round(node.power_w / 10),
    open.has(node.id) ? [node.readings, node.gpu_health, node.partitions, node.power] : node.readings.map((each) => Math.floor(each.utilization * 3)), devicesOf(node).map((each) => each.jobs.map((job) => job.id)), Math.round(Math.max(0, ...node.readings.map((each) => each.temperature_c ?? 0))), trends.get(node.id)?.start_at, trends.get(node.id)?.gpus[0]?.temperature_c.length]) });
  for (const id of opened) {
    const row = by(id);
    if (row) { row.scrollIntoView(); opened.delete(id); }
  }
}

async function read() {
  const [found, levels, running] = await Promise.all([all("/v1/nodes", { clocks: false }, 100_000), get("/v1/topology").catch(() => null), all("/v1/jobs", { state: ["running", "starting", "preempting"], fields: "id,name,placement" }, 5000)]);
  room = levels;
  nodes = found.sort((a, b) => a.zone.localeCompare(b.zone) || a.id.localeCompare(b.id, "en", { numeric: true }));
  jobs = new Map();
  for (const job of running) for (const share of job.placement) for (const index of share.devices) {
    const key = place(share.node_id, index);
    jobs.set(key, [...(jobs.get(key) ?? []), { id: job.id, name: job.name }]);
  }
  draw();
}

async function readTrends() {
  const found = await all("/v1/nodes", { clocks: false, trend: true, fields: "id,trend" }, 100_000);
  trends = new Map(found.filter((each) => each.trend).map((each) => [each.id, each.trend]));
  draw();
}

async function change(path) {
  if (await trying(() => send("POST", path))) await trying(read);
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", draw);
live(["nodes", "jobs"], 5_000, read);
every(300_000, () => trying(readTrends));
