// Vercel's AI SDK at its defaults: its three ways to a server like OpenAI's, each with six kinds of calls.
// node ai_sdk.mjs BASE_URL prints a line for each; the exit code is the number of those that failed.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2];
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "own", baseURL, includeUsage: true, supportsStructuredOutputs: true });
const models = { responses: openai("small"), chat: openai.chat("small"), compatible: compatible("small") };

const Person = z.object({ name: z.string(), age: z.number().int().min(0).max(150) });
const save = tool({ description: "Save a person.", inputSchema: Person, execute: ({ name }) => `saved ${name}` });
const asked = { prompt: "Ann is 30 years old. Who is it about?", maxOutputTokens: 120 };

async function count(stream) {
  let parts = 0;
  for await (const part of stream) {
    if (part?.type === "error") throw part.error;
    parts += 1;
  }
  return parts;
}

const calls = {
  text: async (model) => {
    const { text, usage } = await generateText({ model, ...asked });
    return usage.outputTokens > 0 && text.length > 0;
  },
  "streamed text": async (model) => {
    const result = streamText({ model, ...asked });
    return (await count(result.textStream)) > 0 && (await result.usage).totalTokens > 0;
  },
  object: async (model) => {
    const { output } = await generateText({ model, ...asked, output: Output.object({ schema: Person }) });
    return Person.safeParse(output).success;
  },
  "streamed object": async (model) => {
    const result = streamText({ model, ...asked, output: Output.object({ schema: Person }) });
    return (await count(result.partialOutputStream)) > 0 && Person.safeParse(await result.output).success;
  },
  "forced call": async (model) => {
    const { toolCalls } = await generateText({ model, ...asked, toolChoice: "required", tools: { save } });
    return toolCalls.length > 0 && toolCalls.every(({ input }) => Person.safeParse(input).success);
  },
  "streamed call, then an answer": async (model) => {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "save" } });
    const result = streamText({ model, ...asked, tools: { save }, stopWhen: stepCountIs(2), prepareStep });
    return (await count(result.fullStream)) > 0 && (await result.steps).length === 2;
  },
};

let failed = 0;
for (const [route, model] of Object.entries(models)) {
  for (const [kind, call] of Object.entries(calls)) {
    const held = await call(model).catch((error) => console.log(error.message, error.responseBody ?? ""));
    failed += held ? 0 : 1;
    console.log(held ? "ok" : "FAILED", route, kind);
  }
}
process.exit(failed);
