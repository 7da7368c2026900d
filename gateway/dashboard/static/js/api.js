// The public API, asked with the session's cookie; what changes something repeats the token of the page.
const RELOAD_MS = 30_000;
const token = document.querySelector('meta[name="csrf-token"]')?.content ?? "";

/** What the API answered when it refused. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem?.detail || (status ? `The server answered ${status}.` : "The server does not answer."));
    this.status = status;
    this.code = problem?.code ?? "";
    this.errors = problem?.errors ?? [];
    this.requestId = problem?.request_id;
  }
}

/** Show the sign-in page, by the server, as the session has ended. A service that refuses the gateway answers so, too. */
function signInAgain() {
  const last = Number(sessionStorage.getItem("reloaded") ?? 0);
  if (Date.now() - last < RELOAD_MS) return;
  sessionStorage.setItem("reloaded", String(Date.now()));
  location.reload();
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) signInAgain();
  throw new ApiError(answer.status, await answer.json().catch(() => null));
}

/** Return a path with the query parameters that are not empty; a list repeats its name. */
export function withQuery(path, query = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") found.append(name, each);
    }
  }
  return found.size ? `${path}?${found}` : path;
}

/** Return what the API answers, as JSON. */
export async function get(path, query, options = {}) {
  return (await ask(withQuery(path, query), options)).json();
}

/** Return an answer whose body is read as it arrives. */
export const stream = (path, query, options) => ask(withQuery(path, query), options);

/** Change something; return the answer as JSON, null if it has no body. */
export async function send(method, path, body, headers = {}) {
  const options = { method, headers: { "x-csrf-token": token, ...headers } };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  const answer = await ask(path, options);
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

/** Return all items of a list that comes in pages, at most `most`. */
export async function all(path, query = {}, most = 1000) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(path, { ...query, limit: Math.min(200, most), cursor });
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return items;
}
