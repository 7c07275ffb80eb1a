// Requests to the server of this page, with the user's API key, which is kept as long as the tab.

const KEY = "rootgraft-key";

/** Error response: status, code and message. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** GET a path as JSON. */
export async function get(path, signal) {
  const reply = await request(path, { signal });
  return reply.json();
}

/** POST a body and return the response as JSON. */
export async function post(path, body, signal) {
  const reply = await request(path, posting(body, signal));
  return reply.json();
}

/** POST a body to a route whose answer says no more than that it is done. */
export async function send(path, body) {
  await (await request(path, posting(body))).text();
}

/** Yield the events of a streamed answer as JSON. */
export async function* events(path, body, signal) {
  const reply = await request(path, posting(body, signal));
  let rest = "";
  for await (const text of textOf(reply.body)) {
    const parts = (rest + text).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // A comment, as while a long prompt is computed.
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(reply.status, event.error);
      yield event;
    }
  }
  throw new Error("The answer broke off; it is not whole.");
}

async function* textOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const next = () => named(reader.read(), "The connection broke off; the answer is not whole.");
  for (let piece = await next(); !piece.done; piece = await next()) yield piece.value;
}

/** The promise, with these words for a failure of the network, which browsers word each in their own way. */
const named = (promise, words) =>
  promise.catch((error) => {
    throw error instanceof TypeError ? new Error(words) : error;
  });

const posting = (body, signal) => ({
  method: "POST",
  body: JSON.stringify(body),
  headers: { "content-type": "application/json" },
  signal,
});

async function request(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const reply = await named(fetch(path, { ...options, headers }), "The server cannot be reached.");
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  throw new Refusal(reply.status, body?.error);
}
