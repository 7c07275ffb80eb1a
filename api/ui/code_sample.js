// The playground's request as a command for a shell or a program, to be copied.

import { byId, say } from "./dom.js";

/** Show the request of a body, made when it is looked at; ``question`` throws SyntaxError for a schema that is no JSON. */
export function offerCode(question) {
  const box = byId("code-box");
  const show = () => {
    if (!box.open) return;
    try {
      const { stream, stream_options, ...body } = question();
      say(byId("code"), byId("code-kind").value === "curl" ? curl(body) : python(body));
    } catch (error) {
      say(byId("code"), error.message);
    }
  };
  box.addEventListener("toggle", show);
  byId("ask").addEventListener("input", show);
  byId("code-copy").addEventListener("click", async () => {
    const done = await copied(byId("code").textContent);
    say(byId("code-done"), done ? "copied" : "selected: copy it with the keyboard");
  });
  return show;
}

const address = () => new URL("v1", document.baseURI).href;

function curl(body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl ${address()}/chat/completions`,
    "  -H 'Content-Type: application/json'",
    "  -H \"Authorization: Bearer $ROOTGRAFT_API_KEY\"",
    `  -d '${quoted}'`,
  ].join(" \\\n");
}

function python(body) {
  const parts = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address())}, api_key=os.environ.get("ROOTGRAFT_API_KEY", "none"))`,
    "answer = client.chat.completions.create(",
    ...parts,
    ")",
    "print(answer.choices[0].message)",
  ].join("\n");
}

/** A JSON value as Python writes it. */
function literal(value, depth) {
  const inner = "    ".repeat(depth + 1);
  const end = `\n${"    ".repeat(depth)}`;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((each) => `${inner}${literal(each, depth + 1)},`).join("\n")}${end}]` : "[]";
  }
  const entries = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${literal(each, depth + 1)},`);
  return entries.length ? `{\n${entries.join("\n")}${end}}` : "{}";
}

/** Whether a text is on the clipboard; else it is selected, as browsers keep the clipboard from pages without TLS. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(byId("code"));
    return false;
  }
}
