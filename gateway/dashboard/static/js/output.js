// A job's output as it is written: its end first, then what is added, in a buffer that does not grow.
import { stream } from "./api.js";

const FIRST_BYTES = 64 * 1024;
const MOST_CHARACTERS = 400_000;

/** Follows one job's output into an element, while the page is visible. */
export class Output {
  constructor(path, place, note, tail) {
    Object.assign(this, { path, place, note, tail, kind: "both", generation: null, offset: null, stopping: null, done: false, state: "", kept: 0 });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stopping?.abort() : this.start()));
  }

  /** Follow the newest gang of `job`, from where the last one was left. */
  follow(job) {
    const ended = job.ended_at !== null;
    if (!job.generation) { this.note.textContent = ended ? "It never ran." : "It has not started yet: there is no output."; return; }
    if (job.generation !== this.generation) this.reset(job.generation);
    this.state = job.state;
    if (!this.stopping && !this.done) this.start();
  }

  /** Show another stream: `both`, `stdout` or `stderr`. */
  choose(kind) {
    this.kind = kind;
    this.reset(this.generation);
    this.start();
  }

  reset(generation) {
    this.stopping?.abort();
    Object.assign(this, { generation, offset: null, stopping: null, done: false, kept: 0 });
    this.place.replaceChildren();
  }

  async start() {
    if (this.stopping || this.done || document.hidden || !this.generation) return;
    const stopping = this.stopping = new AbortController();
    const query = { stream: this.kind, generation: this.generation };
    try {
      if (this.offset === null) {
        const peek = await stream(`${this.path}/logs`, { ...query, limit: 1 }, { signal: stopping.signal });
        const size = Number(peek.headers.get("x-wattshift-log-size") ?? 0);
        this.offset = Math.max(0, size - FIRST_BYTES);
        if (this.offset) this.append(`… ${this.offset.toLocaleString("en")} earlier bytes: wattshift logs\n`);
      }
      const answer = await stream(`${this.path}/logs`, { ...query, offset: this.offset, follow: true }, { signal: stopping.signal });
      this.note.textContent = `From ${answer.headers.get("x-wattshift-log-node") ?? "its node"}.`;
      const reader = answer.body.getReader();
      const decoder = new TextDecoder();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        this.offset += value.length;
        this.append(decoder.decode(value, { stream: true }));
      }
      this.done = true;
      if (!this.place.textContent) this.note.textContent = "It wrote nothing.";
    } catch (error) {
      if (error.name !== "AbortError") this.note.textContent = error.status === 404 ? "There is no output, or no longer." : error.message;
    } finally {
      if (this.stopping === stopping) this.stopping = null;
    }
  }

  append(text) {
    const { place } = this;
    place.append(text);
    this.kept += text.length;
    while (this.kept > MOST_CHARACTERS && place.childNodes.length > 1) {
      this.kept -= place.firstChild.textContent.length;
      place.firstChild.remove();
    }
    if (this.tail.checked) place.scrollTop = place.scrollHeight;
  }
}
