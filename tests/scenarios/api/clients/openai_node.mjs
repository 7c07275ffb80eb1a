// OpenAI's SDK for Node: chats, streams, a response that is resumed, and responses over a WebSocket.
// node openai_node.mjs BASE_URL prints a line for each; the exit code is the number of those that failed.
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "small", messages: [{ role: "user", content: "Name a colour." }], max_tokens: 12, temperature: 0 };
const input = { model: "small", input: "Name a colour.", max_output_tokens: 12, temperature: 0 };

async function events(stream) {
  const found = [];
  for await (const event of stream) found.push(event);
  return found;
}

const calls = {
  "a chat and its stream": async () => {
    const whole = await client.chat.completions.create(asked);
    const chunks = await events(await client.chat.completions.create({ ...asked, stream: true }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");
    return text.length > 0 && text === whole.choices[0].message.content && whole.usage.completion_tokens > 0;
  },
  "a schema": async () => {
    const schema = { type: "object", properties: { age: { type: "integer", minimum: 0, maximum: 150 } }, required: ["age"], additionalProperties: false };
    const form = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
    const parsed = await client.chat.completions.parse({ ...asked, max_tokens: 40, response_format: form });
    return Number.isInteger(JSON.parse(parsed.choices[0].message.content).age);
  },
  "an error of a field": async () => {
    try {
      await client.chat.completions.create({ ...asked, temperature: 9 });
    } catch (error) {
      return error instanceof OpenAI.BadRequestError && error.param === "temperature";
    }
    return false;
  },
  "a response and its stream": async () => {
    const whole = await client.responses.create(input);
    const stream = client.responses.stream(input);
    const last = await stream.finalResponse();
    return whole.output_text.length > 0 && last.output_text === whole.output_text;
  },
  "a stream that is resumed": async () => {
    const first = await client.responses.create({ ...input, background: true, stream: true });
    let id, last;
    for await (const event of first) {
      id ??= event.response?.id;
      last = event.sequence_number;
      if (last >= 3) break; // which closes the connection
    }
    const rest = await events(await client.responses.retrieve(id, { stream: true, starting_after: last }));
    const numbers = rest.map((event) => event.sequence_number);
    const whole = await client.responses.retrieve(id);
    const text = rest.at(-1).response.output[0].content[0].text;
    return numbers.every((number, at) => number === last + 1 + at) && text.length > 0 && text === whole.output_text;
  },
  "responses over a WebSocket": async () => {
    const socket = new ResponsesWS(client);
    const found = [];
    const ended = new Promise((resolve, reject) => {
      socket.on("error", reject);
      socket.on("event", (event) => {
        found.push(event);
        if (["response.completed", "response.incomplete", "response.failed"].includes(event.type)) resolve(event);
      });
    });
    socket.send({ type: "response.create", ...input });
    const end = await ended;
    socket.close();
    const over_http = await client.responses.create(input);
    const text = found.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta).join("");
    return text === over_http.output_text && end.response.id !== over_http.id;
  },
};

let failed = 0;
for (const [name, call] of Object.entries(calls)) {
  let result = false;
  try {
    result = await call();
  } catch (error) {
    result = `${error.constructor.name}: ${error.message}`;
  }
  if (result !== true) failed += 1;
  console.log(result === true ? "ok " : "WRONG ", name, result === true ? "" : result);
}
process.exit(failed);
