// Playground: send one prompt, stream the answer, and shade the cached part of the prompt.

import { byId, el } from "./dom.js";
import { seconds, whole } from "./format.js";
import { events, get, post } from "./server.js";

const EXAMPLE = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    company: { type: ["string", "null"], maxLength: 40 },
    email: { type: ["string", "null"], maxLength: 60 },
    phone: { type: ["string", "null"], maxLength: 20 },
  },
  required: ["name", "company", "email", "phone"],
  additionalProperties: false,
};
const ANOTHER = ""; // An adapter loaded on its first use is not listed before.
const answer = byId("answer");
const check = byId("answer-check");
let running = null;

/** List the server's models; called again whenever they may have changed. */
export async function offerModels() {
  const select = byId("ask-model");
  const { data } = await get("v1/models");
  const names = data.map(({ id }) => id);
  if (names.join("\n") === [...select.options].map(({ value }) => value).join("\n")) return;
  const chosen = select.options.length ? select.value : names[0];
  const options = names.map((name) => new Option(name, name));
  select.replaceChildren(...options, new Option("another name …", ANOTHER));
  if (chosen === ANOTHER || names.includes(chosen)) select.value = chosen;
}

byId("ask-schema").value = JSON.stringify(EXAMPLE, null, 2);
byId("ask-system").value = "You are a helpful assistant. Answer in one or two sentences.";
byId("ask-user").value = "At the fair I talked with Vera Hughes of Copper Hill; her number is 555-0142.";
byId("ask-model").addEventListener("change", (event) => {
  byId("ask-other-label").hidden = event.target.value !== ANOTHER;
});
byId("ask-stop").addEventListener("click", () => running?.abort());
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});

async function ask() {
  begin();
  try {
    const body = question();
    const [usage, times] = await stream(body);
    tell(usage, times);
    if (body.response_format) judge();
    await shade(body, usage);
  } catch (error) {
    const stopped = error.name === "AbortError";
    byId("ask-usage").classList.toggle("bad", !stopped);
    byId("ask-usage").textContent = stopped ? "stopped" : error.message;
  } finally {
    end();
  }
}

/** Request body from the form. SyntaxError for a schema that is not JSON. */
function question() {
  const system = byId("ask-system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: byId("ask-user").value }];
  const body = {
    model: byId("ask-model").value || byId("ask-other").value.trim(),
    messages,
    temperature: Number(byId("ask-temperature").value),
    max_tokens: Number(byId("ask-max").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("ask-structured").checked) {
    const schema = parsed(byId("ask-schema").value);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`The schema is not valid JSON: ${error.message}`);
  }
}

function begin() {
  running = new AbortController();
  answer.textContent = "";
  byId("prompt").replaceChildren();
  byId("ask-usage").classList.remove("bad");
  byId("ask-usage").textContent = "asking";
  check.hidden = true;
  byId("ask-go").disabled = true;
  byId("ask-stop").hidden = false;
}

function end() {
  running = null;
  byId("ask-go").disabled = false;
  byId("ask-stop").hidden = true;
}

/** Stream the answer to the page; return its usage and the times of start, first and last text. */
async function stream(body) {
  const times = { begin: performance.now(), first: null, last: null };
  let usage = null;
  for await (const event of events("v1/chat/completions", body, running.signal)) {
    usage = event.usage ?? usage;
    const text = event.choices[0]?.delta.content;
    if (!text) continue;
    times.last = performance.now();
    times.first ??= times.last;
    answer.append(text);
    answer.scrollTop = answer.scrollHeight;
  }
  return [usage, times];
}

function tell(usage, { begin: started, first, last }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  byId("ask-usage").textContent = [
    `${whole(cached)} of ${whole(usage.prompt_tokens)} prompt tokens cached`,
    `${whole(usage.completion_tokens)} in the answer`,
    first ? `first after ${seconds((first - started) / 1000)}, last after ${seconds((last - started) / 1000)}` : null,
  ].filter(Boolean).join(" · ");
}

/** Show whether a structured answer is JSON; the server enforces the schema. */
function judge() {
  let valid = true;
  try {
    JSON.parse(answer.textContent);
  } catch {
    valid = false;
  }
  check.hidden = false;
  check.className = valid ? "tag good" : "tag wrong";
  check.textContent = valid ? "valid JSON" : "cut off";
}

async function shade(body, usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const { tokens } = await post("tokenize", {
    model: body.model,
    messages: body.messages,
    add_generation_prompt: true,
  });
  const part = async (kind, from, to) => {
    const { prompt } = await post("detokenize", { model: body.model, tokens: tokens.slice(from, to) });
    return el("span", kind, prompt.replaceAll("\n", "↵\n"));
  };
  const spans = await Promise.all([part("cached", 0, cached), part("computed", cached)]);
  const box = byId("prompt");
  box.replaceChildren(...spans);
  box.scrollTop = spans[1].offsetTop - box.offsetTop - box.clientHeight / 2; // the end of the cached part
}
