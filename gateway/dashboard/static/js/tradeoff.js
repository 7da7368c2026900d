// One number from least carbon to least time, and what it would have done with the jobs of this site's own past week.
import { send } from "./api.js";
import { by, fill, h } from "./dom.js";
import { carbon, duration, pastDays, percent, relativeChange } from "./format.js";
import { busy } from "./forms.js";
import { me, notice, trying } from "./shell.js";
import { front, scatter } from "./front.js";
import { follow, rowsOf } from "./whatif.js";

const NAME = "hour_share"; // of joint
const STOPS = [0, 0.05, 0.1, 0.2, 0.4, 1];
const DAYS = 7;

export class TradeOff {
  /** `used` is called with the policy in force once the number has been changed. */
  constructor(used) {
    this.used = used;
    this.rows = [];
  }

  /** Show the slider if the policy in force has the number; a worth in watt-hours takes its place until the slider is used. */
  show(active) {
    this.active = active;
    const now = active.parameters[NAME];
    by("trade-off").hidden = now === undefined;
    if (now === undefined) return;
    this.now = now;
    this.stops = [...new Set([...STOPS, now])].toSorted((a, b) => a - b);
    this.slider = h("input", { type: "range", id: "trade", min: 0, max: this.stops.length - 1, step: 1, "aria-describedby": "trade-says", oninput: () => this.say() });
    this.slider.value = this.stops.indexOf(now);
    this.says = h("p", { id: "trade-says", "aria-live": "polite" });
    const others = JSON.stringify([active.name, this.parametersAt(0)]);
    if (this.others !== others) [this.others, this.rows, this.results] = [others, [], h("div")];
    fill(by("trade-off-body"),
      h("div", { class: "field" }, h("label", { for: "trade" }, "From least carbon (left) to least time (right)"), this.slider, this.says),
      active.parameters.hour_wh === null ? null : h("p", { class: "note" }, "hour_wh is set and counts in its place; the slider takes it away."),
      h("div", { class: "buttons form-buttons" },
        h("button", { type: "button", id: "find-front", onclick: (event) => busy(event.target, () => this.find()) }, "Find the front on the past week"),
        me.isOperator ? h("button", { type: "button", class: "primary", id: "use-trade", onclick: (event) => busy(event.target, () => trying(() => this.use())) }, "Put in force") : null),
      this.results);
    this.say();
  }

  get value() { return this.stops[Number(this.slider.value)]; }

  say() {
    const [there, here] = [this.value, this.now].map((value) => this.rows.find((row) => row.value === value));
    const against = there && here && there !== here ? [[there.grams, here.grams, "carbon"], [there.time, here.time, "mean time to end"]].map(([one, other, what]) => [relativeChange(one, other), what]) : [];
    const said = there ? `: ${carbon(there.grams)}, ended after ${duration(there.time)} on average` : "";
    const changes = against.filter(([change]) => change !== null).map(([change, what]) => `${change > 0 ? "+" : ""}${percent(change)} ${what}`);
    this.says.textContent = `${NAME} = ${this.value}${this.value === this.now ? ", in force" : ""}${said}${changes.length ? ` (${changes.join(", ")} against ${this.now})` : ""}`;
    this.slider.setAttribute("aria-valuetext", this.says.textContent);
  }

  parametersAt(value) {
    return { ...this.active.parameters, [NAME]: value, hour_wh: null };
  }

  async find() {
    const base = { jobs: "history", carbon: me.zone, ...pastDays(DAYS, Date.now()), policy: [this.active.name] };
    const run = { started: [], stopped: false };
    const asked = this.stops.map((value) => [{ ...base, params: this.parametersAt(value) }, value]);
    if ((await trying(() => follow(run, asked, this.results).then(() => true))) === null) return void fill(this.results);
    const failed = run.started.find(({ work }) => work.status !== "succeeded");
    if (failed) return void fill(this.results, h("p", { class: "problem" }, failed.work.failure?.detail ?? "A simulation did not end."));
    this.rows = run.started.flatMap(({ work, suffix }) => rowsOf(work, "").map((row) => ({ ...row, value: suffix, label: String(suffix) })));
    const known = this.rows.filter((row) => row.grams !== null && row.time !== null);
    fill(this.results, h("figure", { class: "front" }, scatter(known, front(known)), h("figcaption", { class: "note" }, `Jobs of the past ${DAYS} days under ${this.active.name}, by ${NAME}: carbon against the mean time from submission to end.`)));
    this.say();
  }

  async use() {
    const { name } = this.active;
    this.used(await send("PUT", "/v1/policies/active", { name, parameters: this.parametersAt(this.value) }));
    notice(`${name} is in force with ${NAME} = ${this.value}.`, "good");
  }
}
