// A typed `fetch` for the Wattshift API. Paths, parameters, bodies and answers are those of `api.d.ts`, which
// `npm run generate` makes from the published description.
import type { components, paths } from "./api.d.ts";

export type Schemas = components["schemas"];
export type Method = "get" | "post" | "put" | "patch" | "delete";

type Operation<P extends keyof paths, M extends Method> = paths[P] extends { [K in M]: infer O } ? O : never;
/** The paths that have a method. */
export type PathsWith<M extends Method> = {
  [P in keyof paths]: Operation<P, M> extends { responses: unknown } ? P : never;
}[keyof paths];

type Part<O, Name extends string> = O extends { parameters: { [K in Name]: infer Given } } ? Given : never;
type Body<O> = O extends { requestBody: { content: { "application/json": infer Given } } } ? Given : never;
type Needed<Name extends string, Given> = [Given] extends [never] ? unknown : { [K in Name]: Given };
/** What a request takes besides its path: parameters in the path, the query, and the body. */
export type Request<O> = Needed<"path", Part<O, "path">> & Needed<"body", Body<O>> & {
  query?: O extends { parameters: { query?: infer Given } } ? Given : never;
  headers?: Record<string, string>;
  /** Repeating the request with the same key, within a day, has no second effect. */
  idempotencyKey?: string;
  signal?: AbortSignal;
};

type Success<O> = O extends { responses: infer Answers } ? Answers[Extract<keyof Answers, 200 | 201 | 202>] : never;
/** Without the answer to a request with `fields`, of which nothing is known but the fields asked for. */
type Whole<Json> = Json extends unknown ? (string extends keyof Json ? never : Json) : never;
/** What an operation answers: JSON as described, text otherwise. */
export type Answer<O> = Success<O> extends { content: { "application/json": infer Json } } ? Whole<Json> : string;
type Arguments<O> = object extends Request<O> ? [request?: Request<O>] : [request: Request<O>];

/** A refusal by the API, or an error of it: a problem by RFC 9457. */
export class ApiError extends Error {
  constructor(readonly status: number, readonly code: string, detail: string, readonly problem?: Schemas["Problem"]) {
    super(`${detail} (${code})`);
    this.name = "ApiError";
  }
}

export interface Options {
  /** By default `WATTSHIFT_URL`, or this machine's own installation. */
  url?: string;
  /** By default `WATTSHIFT_API_KEY`. */
  key?: string;
  fetch?: typeof fetch;
}

/** One event of a stream of server-sent events. */
export interface StreamEvent<T> { id: string; type: string; data: T }

export class Wattshift {
  readonly #url: string;
  readonly #key: string;
  readonly #fetch: typeof fetch;

  constructor(options: Options = {}) {
    const environment = globalThis.process?.env ?? {};
    this.#url = (options.url ?? environment["WATTSHIFT_URL"] ?? "http://127.0.0.1:8000").replace(/\/+$/, "");
    this.#key = options.key ?? environment["WATTSHIFT_API_KEY"] ?? "";
    this.#fetch = options.fetch ?? fetch;
  }

  /** Send a request; return what is answered, or throw an `ApiError`. */
  async call<M extends Method, P extends PathsWith<M>>(
    method: M, path: P, ...[request]: Arguments<Operation<P, M>>
  ): Promise<Answer<Operation<P, M>>> {
    const response = await this.#send(method, path, request);
    const isJson = response.headers.get("content-type")?.startsWith("application/json");
    return (isJson ? await response.json() : await response.text()) as Answer<Operation<P, M>>;
  }

  get<P extends PathsWith<"get">>(path: P, ...request: Arguments<Operation<P, "get">>) {
    return this.call("get", path, ...request);
  }

  post<P extends PathsWith<"post">>(path: P, ...request: Arguments<Operation<P, "post">>) {
    return this.call("post", path, ...request);
  }

  /** Yield the events of a stream, such as `/v1/jobs/{job_id}/events`, until it ends. */
  async *events<T = unknown, P extends PathsWith<"get"> = PathsWith<"get">>(
    path: P, ...[request]: Arguments<Operation<P, "get">>
  ): AsyncGenerator<StreamEvent<T>> {
    const response = await this.#send("get", path, request);
    if (!response.body) return;
    let text = "";
    for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
      const blocks = (text + piece).split("\n\n");
      text = blocks.pop() ?? "";
      for (const block of blocks) {
        const of = (name: string) => block.split("\n").filter((line) => line.startsWith(`${name}: `))
          .map((line) => line.slice(name.length + 2)).join("\n");
        if (of("data")) yield { id: of("id"), type: of("event"), data: JSON.parse(of("data")) as T };
      }
    }
  }

  async #send(method: Method, path: string, request: unknown): Promise<Response> {
    const given = (request ?? {}) as {
      path?: Record<string, unknown>; query?: Record<string, unknown>; body?: unknown;
      headers?: Record<string, string>; idempotencyKey?: string; signal?: AbortSignal;
    };
    const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(String(given.path?.[name])));
    const url = new URL(this.#url + filled);
    for (const [name, value] of Object.entries(given.query ?? {}))
      for (const each of Array.isArray(value) ? value : [value])
        if (each !== undefined && each !== null) url.searchParams.append(name, String(each));
    const response = await this.#fetch(url, {
      method: method.toUpperCase(),
      headers: {
        authorization: `Bearer ${this.#key}`,
        ...(given.body === undefined ? {} : { "content-type": "application/json" }),
        ...(given.idempotencyKey === undefined ? {} : { "idempotency-key": given.idempotencyKey }),
        ...given.headers,
      },
      ...(given.body === undefined ? {} : { body: JSON.stringify(given.body) }),
      ...(given.signal === undefined ? {} : { signal: given.signal }),
    });
    if (response.ok) return response;
    const text = await response.text();
    let problem: Schemas["Problem"] | undefined;
    try { problem = JSON.parse(text) as Schemas["Problem"]; } catch { /* a proxy's page, not the API's answer */ }
    throw new ApiError(response.status, problem?.code ?? "unknown", problem?.detail ?? response.statusText, problem);
  }
}
