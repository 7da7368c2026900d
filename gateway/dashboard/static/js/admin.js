// Tenants, keys, budgets and the audit log.
import { all, get, send } from "./api.js";
import { by, fill, h, table } from "./dom.js";
import { ago, at, badge, count, digits, percent, unknown, words } from "./format.js";
import { meter } from "./charts.js";
import { busy, clear, refused } from "./forms.js";
import { confirmed, me, notice, trying } from "./shell.js";

const UNITS = { gpu_h: "GPU h", kwh: "kWh", gco2: "g CO₂" };
const NUMBERS = new Set(["max_gpus", "max_active_jobs", "share_weight", "amount", "requests_per_s", "burst"]);

/** Return what was filled in, numbers as numbers and times with their zone. */
function filled(form) {
  const found = {};
  for (const { name, value, type } of form.elements) {
    if (!name || value.trim() === "") continue;
    found[name] = NUMBERS.has(name) ? Number(value) : type === "datetime-local" ? new Date(value).toISOString() : value.trim();
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
  const form = h("form", { novalidate: true }, h("p", { class: "note" }, `Limits of ${tenant.id}`), h("div", { class: "fields" }, input("max_gpus", "GPUs at most"), input("max_active_jobs", "Active jobs at most"), input("share_weight", "Weight of its share", "any"), input("requests_per_s", "Requests per second", "any"), input("burst", "Requests at once")),
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
  fill(by("tenants"), table("Tenants", [["Tenant"], ["GPUs held", "number"], ["GPUs at most", "number"], ["Jobs waiting", "number"], ["Active jobs at most", "number"], ["Weight", "number"], ["Requests/s", "number"], ["Since"], [""]], tenants.map((each) => {
    const row = h("tr", {}, h("td", { class: "name" }, each.id), h("td", { class: "number" }, count(used.get(each.id)?.gpus ?? 0)), h("td", { class: "number" }, quota(each.limits.max_gpus)),
      h("td", { class: "number" }, count(used.get(each.id)?.waiting_jobs ?? 0)), h("td", { class: "number" }, count(each.limits.max_active_jobs)), h("td", { class: "number" }, digits(each.limits.share_weight)), h("td", { class: "number" }, count(each.limits.requests_per_s)), h("td", { class: "time" }, at(each.created_at)),
      h("td", {}, me.isAdmin ? h("button", { type: "button", class: "quiet", onclick: () => row.replaceWith(h("tr", {}, h("td", { colspan: "9" }, limitsForm(each)))) }, "Change") : ""));
    return row;
  })));
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
  })));
}

function showSecret(made) {
  const text = h("code", { id: "new-secret" }, made.secret);
  fill(by("secret"), h("div", { class: "secret" }, h("p", {}, h("strong", {}, "The new key. "), "It is shown here and never again."), h("p", {}, text),
    h("div", { class: "buttons" }, navigator.clipboard ? h("button", { type: "button", onclick: () => navigator.clipboard.writeText(made.secret).then(() => notice("Copied.", "good")) }, "Copy") : null, h("button", { type: "button", onclick: () => fill(by("secret")) }, "I have it"))));
  by("secret").scrollIntoView({ block: "nearest" });
}

async function showBudgets() {
  const { items } = await get("/v1/budgets");
  fill(by("budgets"), items.length ? table("Budgets", [["Tenant"], ["Project"], ["Used", "number"], [""], ["Amount", "number"], ["Beyond it"], [""]], items.map((each) => {
    const share = each.amount ? each.used / each.amount : 1;
    return h("tr", {}, h("td", {}, each.tenant_id), h("td", {}, each.project ?? "all together"), h("td", { class: "number" }, each.month ? `${digits(each.used)} ${UNITS[each.quantity]}` : unknown()),
      h("td", { class: "share" }, meter(each.used, each.amount, `${percent(share)} used`, share >= 1 ? "bad" : share > 0.8 ? "warn" : "")), h("td", { class: "number" }, `${digits(each.amount)} ${UNITS[each.quantity]}`), h("td", {}, each.exceeded ? badge("bad", each.action === "hold" ? "jobs held" : "exceeded") : each.action),
      h("td", {}, me.isAdmin ? h("button", { type: "button", class: "quiet", onclick: async () => { if (await confirmed(`Remove this budget of ${each.tenant_id}?`, "Remove")) { await trying(() => send("DELETE", `/v1/budgets/${each.id}`)); await trying(showBudgets); } } }, "Remove") : ""));
  })) : h("p", { class: "empty" }, "There are no budgets."));
}

let audit = [];
let older = null;
async function showAudit(further = false) {
  const action = by("audit-filter").elements.action.value.trim();
  const page = await get("/v1/audit", { limit: 25, action, cursor: further ? older : null });
  audit = further ? [...audit, ...page.items] : page.items;
  older = page.next_cursor;
  by("more-audit").hidden = !older;
  fill(by("audit"), audit.length ? table("Audit log, newest first", [["When"], ["Action"], ["Target"], ["By"], ["With"]], audit.map((each) => h("tr", {}, h("td", { class: "time" }, at(each.at)), h("td", {}, each.action), h("td", { class: "name" }, each.target), h("td", {}, each.tenant_id, h("small", { class: "mono" }, each.key_id)),
    h("td", { class: "why" }, Object.keys(each.data).length ? h("code", {}, JSON.stringify(each.data)) : "")))) : h("p", { class: "empty" }, "Nothing was done."));
}

onSubmit("new-tenant", ({ id, ...limits }) => send("POST", "/v1/tenants", { id, limits }), showTenants);
onSubmit("new-key", async (asked) => showSecret(await send("POST", "/v1/keys", asked)), showKeys);
onSubmit("new-budget", (asked) => send("PUT", "/v1/budgets", asked), showBudgets);
by("audit-filter").addEventListener("submit", (event) => { event.preventDefault(); trying(showAudit); });
by("more-audit").addEventListener("click", (event) => busy(event.target, () => trying(() => showAudit(true))));
by("more-keys")?.addEventListener("click", (event) => busy(event.target, () => trying(() => showKeys(true))));
for (const show of [showTenants, showBudgets, showAudit, ...(me.isAdmin ? [showKeys] : [])]) trying(show);
