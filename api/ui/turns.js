// Earlier turns of the playground's conversation: questions, answers, calls of tools and their results.

import { byId, el, say } from "./dom.js";

let turns = [];
let calls = []; // of the last answer, whose results are still to be given
let changed = () => {};

/** Call a function whenever the conversation has changed. */
export function onTurns(listener) {
  changed = listener;
}

/** The messages of a request: the system prompt, the turns so far, and what was typed. */
export function messagesWith(system, typed) {
  const last = calls.length ? { role: "tool", tool_call_id: calls[0].id, content: typed } : { role: "user", content: typed };
  return [...(system ? [{ role: "system", content: system }] : []), ...turns, last];
}

/** Whether results of further calls have to be given before the model can be asked again. */
export const wantsMoreResults = () => calls.length > 1;

/** Keep what was typed as a turn, and ask for the next call's result. */
export function takeResult(typed) {
  turns.push(messagesWith("", typed).at(-1));
  calls.shift();
  show();
}

/** Keep a question with its answer, after which the conversation goes on. */
export function keep(messages, text, toolCalls) {
  turns = messages.filter(({ role }) => role !== "system");
  const called = toolCalls.length ? { tool_calls: toolCalls } : {};
  turns.push({ role: "assistant", content: text || (toolCalls.length ? null : ""), ...called });
  calls = [...toolCalls];
  show();
}

function show() {
  byId("turns-box").hidden = !turns.length;
  byId("turns").replaceChildren(...turns.map(turn));
  byId("turns").scrollTop = byId("turns").scrollHeight;
  say(byId("ask-user-label"), calls.length ? `Result of ${calls[0].function.name}` : "User");
  changed();
}

function turn({ role, content, tool_calls: called = [] }) {
  const told = [content, ...called.map((call) => `${call.function.name}(${call.function.arguments})`)].filter(Boolean);
  return el("li", role, el("b", "muted", role), " ", told.join("\n"));
}

byId("turns-clear").addEventListener("click", () => {
  turns = [];
  calls = [];
  show();
  byId("ask-user").focus();
});
