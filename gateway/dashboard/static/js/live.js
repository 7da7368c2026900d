// What keeps a page up to date: one stream of events, and timers that rest while nobody looks.
import { tell } from "./shell.js";

const status = document.getElementById("live");

function say(state, text) {
  status.hidden = false;
  status.className = state;
  status.textContent = text;
}

/**
 * Follow server-sent events while the page is visible.
 *
 * Browsers open six connections to a host; a hidden page gives its own back. `onOpen` runs whenever the stream has
 * opened: what happened in between was missed, so that is the time to read afresh.
 */
export function follow(path, onEvent, onOpen = () => {}, onLost = () => {}) {
  let source = null;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource(path);
    source.onopen = () => { say("on", "live"); onOpen(); };
    source.onerror = () => {
      onLost();
      if (source?.readyState !== EventSource.CLOSED) return say("off", "reconnecting…");
      close(); // refused, or ended for good
      if (!done) setTimeout(open, 5000);
    };
    const read = (message) => onEvent(JSON.parse(message.data));
    for (const type of TYPES) source.addEventListener(type, read);
    source.onmessage = read;
  };
  const close = () => { source?.close(); source = null; };
  let done = false;
  document.addEventListener("visibilitychange", () => (document.hidden || done ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", () => done || open());
  open();
  return () => { done = true; close(); say("ended", "ended"); };
}

// An EventSource gives named events only to those who ask for their names.
const TYPES = ["submitted", "queued", "held", "starting", "running", "preempting", "succeeded", "failed", "cancelled",
  "cancel_requested", "hold_requested", "hold_withdrawn", "had_finished", "set",
  "setting_refused", "exec", "exec_ended", "profiling", "profiled", "profiling_failed"].map((name) => `job.${name}`);
TYPES.push("changed");

const POLL_MS = 5_000;
const LONGEST_PAUSE_MS = 60_000;
const views = []; // what `live` keeps up to date: `{kinds, touch}`
const hearers = []; // of jobs' events
let isUp = false;
let isShared = false;

/** Follow all that a page shows, by the one stream that all its parts share. */
function share() {
  if (isShared) return;
  isShared = true;
  follow("/v1/events?changes=true", (event) => {
    const kinds = event.kinds ?? ["jobs"];
    for (const view of views) if (view.kinds.some((each) => kinds.includes(each))) view.touch();
    if (!event.kinds) for (const hear of hearers) hear(event);
  }, () => {
    isUp = true;
    for (const view of views) view.touch(); // what changed in between was missed
  }, () => { isUp = false; });
}

/** Call `hear` with each event of a job that one may see. */
export function onJobs(hear) {
  hearers.push(hear);
  share();
}

/**
 * Do `work` now, and again after pauses that double while it fails. Returns what asks for it to be done soon, but not
 * more often than every `ms`, one at a time, and not while nobody looks.
 */
export function persistently(work, ms = 0) {
  let due = null;
  let isBusy = false;
  let isDirty = false;
  let last = -Infinity;
  let pause = POLL_MS;
  const run = async () => {
    due = null;
    if (document.hidden) return;
    [isBusy, isDirty, last] = [true, false, Date.now()];
    try {
      await work();
      pause = POLL_MS;
    } catch (error) {
      tell(error);
      due = setTimeout(run, pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
    isBusy = false;
    if (isDirty) touch();
  };
  const touch = () => {
    isDirty = true;
    if (!isBusy && due === null && !document.hidden) due = setTimeout(run, Math.max(0, last + ms - Date.now()));
  };
  document.addEventListener("visibilitychange", () => isDirty && touch());
  touch();
  return touch;
}

/**
 * Do `work` persistently now and whenever one of `kinds` has changed. While there is no stream, it is done every `ms`,
 * or every five seconds if that is longer. Returns what asks for it to be done soon.
 */
export function live(kinds, ms, work) {
  const touch = persistently(work, ms);
  views.push({ kinds, touch });
  setInterval(() => isUp || touch(), Math.max(ms, POLL_MS));
  document.addEventListener("visibilitychange", touch);
  share();
  return touch;
}

/** Return a function that does `work` soon, and not more often than every `ms`. */
export function throttled(work, ms) {
  let due = null;
  let last = 0;
  return () => {
    if (due !== null) return;
    due = setTimeout(async () => {
      due = null;
      last = Date.now();
      await work();
    }, Math.max(0, last + ms - Date.now()));
  };
}

/** Do `work` now and every `ms` while the page is visible; one at a time. */
export function every(ms, work) {
  let busy = false;
  const tick = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try { await work(); } finally { busy = false; }
  };
  tick();
  setInterval(tick, ms);
  document.addEventListener("visibilitychange", tick);
  return tick;
}

/** A list of at most `most` entries: the oldest go first. */
export class Ring {
  constructor(most) { this.most = most; this.items = []; }
  push(item) {
    this.items.push(item);
    if (this.items.length > this.most) this.items.splice(0, this.items.length - this.most);
  }
}
