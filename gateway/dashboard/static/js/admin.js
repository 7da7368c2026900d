// Tenants, keys, budgets and the audit log.
import { all, get, send, withQuery } from "./api.js";
import { by, fill, h, table } from "./dom.js";
import { ago, at, badge, count, digits, percent, unknown, words } from "./format.js";
import { meter } from "./charts.js";
import { persistently } from "./live.js";
import { busy, clear, refused } from "./forms.js";
import { confirmed, me, notice, trying } from "./shell.js";

const UNITS = { gpu_h: "GPU h", kwh: "kWh", gco2: "g CO₂" };
const ROWS = { class: "rows" };
const NUMBERS = new Set(["guaranteed_gpus", "max_gpus", "max_active_jobs", "share_weight", "amount", "requests_per_s", "burst"]);

/** Return what was filled in, numbers as numbers and times with their zone. */
function filled(form) {
  const found = {};
  for (const { name, value, type } of form.elements) {
    if (!name || value.trim() === "") continue;
    found[name] = NUMBERS.has(name) ? Number(value) : type === "datetime-local" ? new Date(value).toISOString() : type === "password" ? value : value.trim();
  }
  return found;
}

/** Let a form do `work` with what was filled in, then `after`. */
function onSubmit(id, work, after) {
  const form = by(id);
  form?.addEventListener("submit", (event) => {
    event.preventDefault();
    clear(form);
    busy(event.submitter, async () => {
      try {
        await work(filled(form), form);
        form.reset();
        form.closest("details").open = false;
      } catch (error) {
        return refused(form, error, (pointer) => form.elements[pointer.split("/").at(-1)]);
      }
      await trying(after);
    });
  });
}

const quota = (value) => (value === null ? "no limit" : count(value));

function limitsForm(tenant) {
  const input = (name, label, step = "1") => h("div", { class: "field" }, h("label", { for: `${tenant.id}-${name}` }, label),
    h("input", { id: `${tenant.id}-${name}`, name, type: "number", min: "0", step, value: tenant.limits[name] ?? "", placeholder: name === "max_gpus" ? "no limit" : null }));
  const form = h("form", { novalidate: true }, h("p", { class: "note" }, `Limits of ${tenant.id}`), h("div", { class: "fields" }, input("guaranteed_gpus", "GPUs guaranteed"), input("max_gpus", "GPUs at most"), input("max_active_jobs", "Active jobs at most"), input("share_weight", "Weight of its share", "any"), input("requests_per_s", "Requests per second", "any"), input("burst", "Requests at once")),
    h("div", { class: "buttons form-buttons" }, h("button", { type: "button", onclick: () => trying(showTenants) }, "Leave as it is"), h("button", { class: "primary" }, "Change")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clear(form);
    busy(event.submitter, async () => {
      try {
        await send("PATCH", `/v1/tenants/${tenant.id}`, { limits: { max_gpus: null, ...filled(form) } });
      } catch (error) {
        return refused(form, error, (pointer) => form.elements[pointer.split("/").at(-1)]);
      }
      notice(`The limits of ${tenant.id} are changed.`, "good");
      await trying(showTenants);
    });
  });
  return form;
}

async function showTenants() {
  const [tenants, shares] = await Promise.all([all("/v1/tenants", {}, 2000), get("/v1/shares").catch(() => ({ items: [] }))]);
  const used = new Map(shares.items.map((each) => [each.tenant_id, each]));
  const choice = by("users-tenant");
  if (choice && choice.options.length !== tenants.length) fill(choice, tenants.map((each) => h("option", { value: each.id, selected: each.id === me.tenant }, each.id)));
  fill(by("tenants"), table("Tenants", [["Tenant"], ["GPUs guaranteed", "number"], ["Held", "number"], ["Borrowed", "number"], ["GPUs at most", "number"], ["Jobs waiting", "number"], ["Active jobs at most", "number"], ["Weight", "number"], ["Requests/s", "number"], ["Since"], [""]], tenants.map((each) => {
    const row = h("tr", {}, h("td", { class: "name" }, each.id), h("td", { class: "number" }, count(each.limits.guaranteed_gpus)), h("td", { class: "number" }, count(used.get(each.id)?.gpus ?? 0)), h("td", { class: "number" }, count(used.get(each.id)?.borrowed_gpus ?? 0)), h("td", { class: "number" }, quota(each.limits.max_gpus)),
      h("td", { class: "number" }, count(used.get(each.id)?.waiting_jobs ?? 0)), h("td", { class: "number" }, count(each.limits.max_active_jobs)), h("td", { class: "number" }, digits(each.limits.share_weight)), h("td", { class: "number" }, count(each.limits.requests_per_s)), h("td", { class: "time" }, at(each.created_at)),
      h("td", {}, me.isAdmin ? h("button", { type: "button", class: "quiet", onclick: () => row.replaceWith(h("tr", {}, h("td", { colspan: "11" }, limitsForm(each)))) }, "Change") : ""));
    return row;
  }), ROWS));
}

let keys = [];
let nextKeys = null;
async function showKeys(further = false) {
  const page = await get("/v1/keys", { limit: 25, cursor: further ? nextKeys : null });
  keys = further ? [...keys, ...page.items] : page.items;
  nextKeys = page.next_cursor;
  by("more-keys").hidden = !nextKeys;
  const now = Date.now();
  fill(by("keys"), table("API keys, newest first", [["Key"], ["Tenant, user"], ["Role"], ["State"], ["Last used"], ["Expires"], [""]], keys.map((each) => {
    const over = each.revoked_at || (each.expires_at && new Date(each.expires_at) <= now);
    const act = (text, question, work) => h("button", { type: "button", class: "quiet", onclick: async () => { if (await confirmed(question, text)) await trying(work); } }, text);
    return h("tr", {}, h("td", { class: "name" }, each.label || h("span", { class: "unknown" }, "no label"), h("small", { class: "mono" }, each.id)), h("td", {}, each.tenant_id, h("small", {}, [each.user, each.project && `only ${each.project}`].filter(Boolean).join(", "))), h("td", {}, words(each.role)),
      h("td", {}, badge(over ? "cancelled" : "good", each.revoked_at ? "revoked" : over ? "expired" : "valid")), h("td", { class: "time" }, each.last_used_at ? at(each.last_used_at, ago) : "never"), h("td", { class: "time" }, each.expires_at ? at(each.expires_at) : "never"),
      h("td", { class: "number" }, over ? "" : [act("Rotate", `Replace ${each.label || each.id} by a new key? The old one ends at once.`, async () => { showSecret(await send("POST", `/v1/keys/${each.id}/rotate`, {})); await showKeys(); }),
        act("Revoke", `Revoke ${each.label || each.id}? Whoever uses it is out within seconds.`, async () => { await send("DELETE", `/v1/keys/${each.id}`); await showKeys(); })]));
  }), ROWS));
}

function showSecret(made, place = by("secret"), what = "The new key.") {
  const text = h("code", { id: "new-secret" }, made.secret);
  fill(place, h("div", { class: "secret" }, h("p", {}, h("strong", {}, `${what} `), "It is shown here and never again."), h("p", {}, text),
    h("div", { class: "buttons" }, navigator.clipboard ? h("button", { type: "button", onclick: () => navigator.clipboard.writeText(made.secret).then(() => notice("Copied.", "good")) }, "Copy") : null, h("button", { type: "button", onclick: () => fill(place) }, "I have it"))));
  place.scrollIntoView({ block: "nearest" });
}

/** Return a button that does `work` once `question` was agreed to, and then shows the table anew. */
const asking = (text, question, work, after) => h("button", { type: "button", class: "quiet", onclick: async () => {
  if (question && !(await confirmed(question, text))) return;
  await trying(work);
  await trying(after);
} }, text);

async function showUsers() {
  const tenant = by("users-tenant").value || me.tenant;
  const users = await all(`/v1/tenants/${tenant}/users`, {}, 2000);
  const path = (each) => `/v1/tenants/${tenant}/users/${each.name}`;
  fill(by("users"), users.length ? table("Users", [["User"], ["Account on nodes"], ["State"], ["Since"], [""]], users.map((each) => h("tr", {}, h("td", { class: "name" }, each.name), h("td", {}, each.account ?? "the tenant's"),
    h("td", {}, badge(each.disabled_at ? "cancelled" : "good", each.disabled_at ? "disabled" : "active")), h("td", { class: "time" }, at(each.created_at)),
    h("td", { class: "number" }, each.disabled_at ? asking("Enable", null, () => send("PATCH", path(each), { disabled: false }), showUsers) : asking("Disable", `Disable ${each.name}? All keys of that user are refused.`, () => send("PATCH", path(each), { disabled: true }), showUsers)))), ROWS) : h("p", { class: "empty" }, "This tenant has no users; its keys belong to the tenant."));
}

async function showSecrets() {
  const { items } = await get("/v1/secrets");
  fill(by("secrets"), items.length ? table("Secrets", [["Name"], ["Project"], ["Set"], [""]], items.map((each) => h("tr", {}, h("td", { class: "name" }, each.name, h("small", {}, `version ${each.version}`)), h("td", {}, each.project || "all"), h("td", { class: "time" }, at(each.updated_at, ago)),
    h("td", { class: "number" }, me.mayChange ? asking("Delete", `Delete ${each.name}? Jobs that name it do not start any more.`, () => send("DELETE", withQuery(`/v1/secrets/${each.name}`, { project: each.project })), showSecrets) : ""))), ROWS) : h("p", { class: "empty" }, "There are no secrets."));
}

async function showWebhooks() {
  const { items } = await get("/v1/webhooks");
  const path = (each) => `/v1/webhooks/${each.id}`;
  fill(by("webhooks"), items.length ? table("Webhooks", [["Address"], ["State"], [""]], items.map((each) => h("tr", {}, h("td", { class: "name" }, each.url, h("small", {}, each.events.join(", "), each.project ? `, only ${each.project}` : "")),
    h("td", {}, badge(each.enabled ? (each.failing_since ? "bad" : "good") : "cancelled", each.enabled ? (each.failing_since ? "failing" : "works") : "disabled"), each.disabled_reason || each.failing_since ? h("small", {}, each.disabled_reason ?? ["since ", at(each.failing_since)]) : null),
    h("td", { class: "number" }, me.mayChange ? [asking("Test", null, async () => { await send("POST", `${path(each)}/test`); notice("A test message is on its way.", "good"); }, showWebhooks), asking("Delete", `Delete the webhook to ${each.url}?`, () => send("DELETE", path(each)), showWebhooks)] : ""))), ROWS) : h("p", { class: "empty" }, "There are no webhooks."));
}

async function showEngines() {
  const { items } = await get("/v1/engines");
  fill(by("engines"), items.length ? table("Engines", [["Engine"], ["Mode"], ["State"], ["GPUs", "number"], ["Jobs"]], items.map((each) => h("tr", {}, h("td", { class: "name" }, each.name, h("small", {}, `${each.kind} ${each.version}`)), h("td", {}, words(each.mode), each.queues?.length ? h("small", {}, each.queues.join(", ")) : null),
    h("td", {}, badge(each.problem || !each.heard ? "bad" : "good", each.problem ?? (each.heard ? "heard" : "silent")), h("small", {}, at(each.reported_at, ago))), h("td", { class: "number" }, `${count(each.gpus_in_use)} of ${count(each.gpus)}`),
    h("td", {}, Object.entries(each.jobs).map(([state, n]) => `${count(n)} ${words(state)}`).join(", ") || "none"))), ROWS) : h("p", { class: "empty" }, "No other scheduler is connected. ", h("code", {}, "wattshift engine --help"), " says how Slurm, Kueue and Ray are."));
}

async function showBudgets() {
  const { items } = await get("/v1/budgets");
  fill(by("budgets"), items.length ? table("Budgets", [["Tenant"], ["Project"], ["Used", "number"], ["Share"], ["Amount", "number"], ["Beyond it"], [""]], items.map((each) => {
    const share = each.amount ? each.used / each.amount : 1;
    return h("tr", {}, h("td", {}, each.tenant_id), h("td", {}, each.project ?? "all together"), h("td", { class: "number" }, each.month ? `${digits(each.used)} ${UNITS[each.quantity]}` : unknown()),
      h("td", { class: "share" }, meter(each.used, each.amount, `${percent(share)} used`, share >= 1 ? "bad" : share > 0.8 ? "warn" : "")), h("td", { class: "number" }, `${digits(each.amount)} ${UNITS[each.quantity]}`), h("td", {}, each.exceeded ? badge("bad", each.action === "hold" ? "jobs held" : "exceeded") : each.action),
      h("td", {}, me.isAdmin ? h("button", { type: "button", class: "quiet", onclick: async () => { if (await confirmed(`Remove this budget of ${each.tenant_id}?`, "Remove")) { await trying(() => send("DELETE", `/v1/budgets/${each.id}`)); await trying(showBudgets); } } }, "Remove") : ""));
  }), ROWS) : h("p", { class: "empty" }, "There are no budgets."));
}

/** Return the details of an entry of the audit log as words: `{max_gpus: 5}` becomes "max GPUs 5". */
function inWords(data) {
  const value = (each) => (each === null ? "none" : typeof each === "boolean" ? (each ? "yes" : "no") : Array.isArray(each) ? each.map(value).join(", ") || "none" : typeof each === "object" ? inWords(each) : String(each));
  if (data.before && data.after) {
    const changed = Object.keys(data.after).filter((name) => value(data.after[name]) !== value(data.before[name] ?? null));
    return changed.map((name) => `${words(name)} ${value(data.before[name] ?? null)} → ${value(data.after[name])}`).join("; ");
  }
  return Object.entries(data).map(([name, each]) => `${words(name)}${typeof each === "object" && each !== null && !Array.isArray(each) ? ":" : ""} ${value(each)}`).join("; ");
}

function whoDid({ key_id: id, tenant_id: tenant }) {
  if (!id) return ["the control plane"];
  const key = keys.find((each) => each.id === id);
  return [key?.user ?? key?.label ?? tenant, h("small", { class: "mono" }, id)];
}

let audit = [];
let older = null;
async function showAudit(further = false) {
  const action = by("audit-filter").elements.action.value.trim();
  const page = await get("/v1/audit", { limit: 25, action, cursor: further ? older : null });
  audit = further ? [...audit, ...page.items] : page.items;
  older = page.next_cursor;
  by("more-audit").hidden = !older;
  fill(by("audit"), audit.length ? table("Audit log, newest first", [["When"], ["What"], ["Of"], ["By"], ["With"]], audit.map((each) => h("tr", {}, h("td", { class: "time" }, at(each.at)), h("td", {}, words(each.action.replace(".", " "))), h("td", { class: "name" }, each.target), h("td", {}, ...whoDid(each)),
    h("td", { class: "why" }, inWords(each.data)))), ROWS) : h("p", { class: "empty" }, "Nothing was done."));
}

onSubmit("new-tenant", ({ id, ...limits }) => send("POST", "/v1/tenants", { id, limits }), showTenants);
onSubmit("new-key", async (asked) => showSecret(await send("POST", "/v1/keys", asked)), showKeys);
onSubmit("new-user", (asked) => send("POST", `/v1/tenants/${by("users-tenant").value || me.tenant}/users`, asked), showUsers);
onSubmit("new-secret-form", ({ name, ...asked }) => send("PUT", `/v1/secrets/${encodeURIComponent(name)}`, asked), showSecrets);
onSubmit("new-webhook", async ({ events, ...asked }) => showSecret(await send("POST", "/v1/webhooks", { ...asked, events: events.split(/[\s,]+/) }), by("webhook-secret"), "The key that signs its messages."), showWebhooks);
onSubmit("new-budget", (asked) => send("PUT", "/v1/budgets", asked), showBudgets);
by("audit-filter").addEventListener("submit", (event) => { event.preventDefault(); trying(showAudit); });
by("more-audit").addEventListener("click", (event) => busy(event.target, () => trying(() => showAudit(true))));
by("more-keys")?.addEventListener("click", (event) => busy(event.target, () => trying(() => showKeys(true))));
by("users-tenant")?.addEventListener("change", () => trying(showUsers));
const first = [showTenants, showBudgets, showSecrets, showWebhooks, showEngines, ...(me.isAdmin ? [showUsers, showKeys] : [])];
persistently(async () => {
  await Promise.all(first.map((show) => show()));
  persistently(showAudit); // which names keys by their labels
});
