// Playground: send a conversation, stream the answer, and shade the cached part of the prompt.

import { offerCode } from "./code_sample.js";
import { byId, el, say } from "./dom.js";
import { seconds, whole } from "./format.js";
import { events, get, post } from "./server.js";
import { keep, messagesWith, onTurns, takeResult, wantsMoreResults } from "./turns.js";

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
const TOOLS = [
  {
    type: "function",
    function: {
      name: "find_contact",
      description: "Look a person up in the address book.",
      parameters: { type: "object", properties: { name: { type: "string" } }, required: ["name"] },
    },
  },
];
const ANOTHER = ""; // An adapter loaded on its first use is not listed before.
const answer = byId("answer");
const thought = byId("thought");
const check = byId("answer-check");
let running = null;
let questions = 0; // asked so far
let asked = null; // the last whole answer: its messages, text and calls of tools

/** List the server's models; called again whenever they may have changed. */
export async function offerModels() {
  const select = byId("ask-model");
  const { data } = await get("v1/models");
  const names = data.map(({ id }) => id);
  if ([...names, ANOTHER].join("\n") === [...select.options].map(({ value }) => value).join("\n")) return;
  const chosen = select.options.length ? select.value : names[0];
  const options = names.map((name) => new Option(name, name));
  select.replaceChildren(...options, new Option("another name …", ANOTHER));
  if (chosen === ANOTHER || names.includes(chosen)) select.value = chosen;
}

byId("ask-schema").value = JSON.stringify(EXAMPLE, null, 2);
byId("ask-tools").value = JSON.stringify(TOOLS, null, 2);
byId("ask-system").value = "You are a helpful assistant. Answer in one or two sentences.";
byId("ask-user").value = "At the fair I talked with Vera Hughes of Copper Hill; her number is 555-0142.";
byId("ask-model").addEventListener("change", (event) => {
  byId("ask-other-label").hidden = event.target.value !== ANOTHER;
  byId("ask-other").required = event.target.value === ANOTHER;
});
byId("ask").addEventListener("keydown", (event) => {
  const asks = event.key === "Enter" && (event.ctrlKey || event.metaKey);
  if (asks && !running) byId("ask").requestSubmit();
  if (event.key === "Escape") running?.abort();
});
byId("ask-stop").addEventListener("click", () => running?.abort());
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!wantsMoreResults()) return ask();
  takeResult(byId("ask-user").value);
  byId("ask-user").value = "";
});
byId("ask-continue").addEventListener("click", () => {
  keep(asked.messages, asked.text, asked.calls);
  asked = null;
  byId("ask-continue").hidden = true;
  byId("ask-user").value = "";
  byId("ask-user").focus();
});
onTurns(offerCode(question));

async function ask() {
  begin();
  const own = questions;
  const isNewest = () => own === questions;
  try {
    const body = question();
    const { usage, times, finish, calls, text } = await stream(body);
    tell(usage, times, finish);
    asked = { messages: body.messages, text, calls };
    byId("ask-continue").hidden = false;
    if (body.response_format) judge();
    shade(body, usage, isNewest).catch((error) => isNewest() && complain(error));
  } catch (error) {
    complain(error);
  } finally {
    end();
  }
}

function complain(error) {
  const stopped = error.name === "AbortError";
  byId("ask-usage").classList.toggle("bad", !stopped);
  say(byId("ask-usage"), stopped ? "stopped" : error.message);
}

/** Request body from the form. SyntaxError for a schema or tools that are not JSON. */
function question() {
  const body = {
    model: byId("ask-model").value || byId("ask-other").value.trim(),
    messages: messagesWith(byId("ask-system").value.trim(), byId("ask-user").value),
    temperature: Number(byId("ask-temperature").value),
    max_tokens: Number(byId("ask-max").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("ask-structured").checked) {
    const schema = parsed(byId("ask-schema").value, "The schema is");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (byId("ask-offers-tools").checked) body.tools = parsed(byId("ask-tools").value, "The tools are");
  return body;
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${what} not valid JSON: ${error.message}`);
  }
}

function begin() {
  running = new AbortController();
  questions += 1;
  asked = null;
  byId("ask-continue").hidden = true;
  answer.textContent = "";
  answer.ariaBusy = "true"; // It is read aloud once, when it is whole.
  thought.textContent = "";
  byId("thought-box").hidden = true;
  byId("prompt").replaceChildren();
  byId("ask-usage").classList.remove("bad");
  say(byId("ask-usage"), "asking");
  check.hidden = true;
  byId("ask-stop").hidden = false;
  if (document.activeElement === byId("ask-go")) byId("ask-stop").focus();
  byId("ask-go").disabled = true;
}

function end() {
  running = null;
  answer.ariaBusy = "false";
  byId("ask-go").disabled = false;
  if (document.activeElement === byId("ask-stop")) byId("ask-go").focus();
  byId("ask-stop").hidden = true;
}

/** Stream thought and answer to the page; return usage, times of start, first and last text, finish reason and calls. */
async function stream(body) {
  const times = { begin: performance.now(), first: null, last: null };
  const calls = [];
  let text = "";
  let usage = null;
  let finish = null;
  for await (const event of events("v1/chat/completions", body, running.signal)) {
    usage = event.usage ?? usage;
    const [choice] = event.choices;
    finish = choice?.finish_reason ?? finish;
    const { reasoning_content: thinking, content, tool_calls: called } = choice?.delta ?? {};
    if (!thinking && !content && !called?.length) continue;
    times.last = performance.now();
    if (!times.first) say(byId("ask-usage"), "answering");
    times.first ??= times.last;
    if (thinking) {
      byId("thought-box").hidden = false;
      extend(thought, thinking);
    }
    if (content) extend(answer, content);
    text += content ?? "";
    for (const part of called ?? []) extend(answer, grown(calls, part));
  }
  return { usage, times, finish, calls, text };
}

/** Add a piece of a call of a tool to the calls, and return what the page shows of it. */
function grown(calls, { index, id, function: { name, arguments: piece } = {} }) {
  const isNew = !calls[index];
  calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
  calls[index].function.arguments += piece ?? "";
  return `${isNew ? `${index || answer.textContent ? "\n" : ""}${name} ` : ""}${piece ?? ""}`;
}

/** Append text, and scroll along where the end was in sight. */
function extend(box, text) {
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
  box.append(text);
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function tell(usage, { begin: started, first, last }, finish) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const told = [
    finish === "length" ? "cut off at Max tokens" : null,
    `${whole(cached)} of ${whole(usage.prompt_tokens)} prompt tokens cached`,
    `${whole(usage.completion_tokens)} in the answer`,
    first ? `first after ${seconds((first - started) / 1000)}, last after ${seconds((last - started) / 1000)}` : null,
  ];
  say(byId("ask-usage"), told.filter(Boolean).join(" · "));
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

/**
 * Show the prompt, and which of it was cached; a character whose tokens were so in part counts as computed.
 * Nothing is shown once another question has been asked.
 */
async function shade(body, usage, isNewest) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const { tokens } = await post("tokenize", {
    model: body.model,
    messages: body.messages,
    ...(body.tools ? { tools: body.tools } : {}),
    add_generation_prompt: true,
  });
  const textOf = async (count) => (await post("detokenize", { model: body.model, tokens: tokens.slice(0, count) })).prompt;
  const [head, text] = await Promise.all([textOf(cached), textOf(tokens.length)]);
  if (!isNewest()) return;
  let shared = head.length;
  while (!text.startsWith(head.slice(0, shared))) shared -= 1; // The first bytes of a character are another one alone.
  const part = (kind, from, to) => el("span", kind, text.slice(from, to).replaceAll("\n", "↵\n"));
  const spans = [part("cached", 0, shared), part("computed", shared)];
  const box = byId("prompt");
  box.replaceChildren(...spans);
  box.scrollTop = spans[1].offsetTop - box.offsetTop - box.clientHeight / 2; // the end of the cached part
}
