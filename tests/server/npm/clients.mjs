// The npm clients against a daemon: node clients.mjs NAME URL. Prints what it got as JSON; throws where a client does.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [, , name, url] = process.argv;
const QUESTION = "What is 12 + 30?";
const SUM = "What is 12 plus 30?";
const numbers = { a: { type: "number" }, b: { type: "number" } };
const schema = { type: "object", properties: numbers, required: ["a", "b"] };
const about = "Add two numbers.";
const add = ({ a, b }) => String(a + b);
const Pet = z.object({ kind: z.enum(["cat", "dog"]) });
const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

async function collected(stream, text) {
  let whole = "";
  for await (const each of stream) whole += text(each) ?? "";
  return whole;
}

/** Everything that the AI SDK does with a model. */
async function withModel(model) {
  const adder = tool({ description: about, inputSchema: jsonSchema(schema), execute: async (given) => add(given) });
  const asked = { model, temperature: 0, maxOutputTokens: 80 };
  const whole = await generateText({ ...asked, prompt: QUESTION });
  const streamed = await collected(streamText({ ...asked, prompt: QUESTION }).textStream, (text) => text);
  const steps = { ...asked, prompt: SUM, tools: { adder }, stopWhen: stepCountIs(3) };
  const agent = await generateText(steps);
  const flowing = streamText(steps);
  const flow = await collected(flowing.textStream, (text) => text);
  const forced = await generateText({ ...asked, prompt: SUM, tools: { adder }, toolChoice: "required" });
  const form = await generateText({ ...asked, prompt: "A pet?", output: Output.object({ schema: Pet }) });
  return {
    whole: whole.text,
    streamed,
    results: agent.steps.flatMap((step) => step.toolResults).map((result) => result.output),
    answer: agent.text,
    flow,
    call: forced.toolCalls[0].toolName,
    kind: form.output.kind,
  };
}

const clients = {
  async openai() {
    const messages = [{ role: "user", content: QUESTION }];
    const asked = { model: "demo", temperature: 0 };
    const whole = await api.chat.completions.create({ ...asked, messages });
    const stream = await api.chat.completions.create({ ...asked, messages, stream: true });
    const streamed = await collected(stream, (chunk) => chunk.choices[0]?.delta?.content);
    const response = await api.responses.create({ ...asked, input: QUESTION });
    const kinds = [];
    for await (const event of await api.responses.create({ ...asked, input: QUESTION, stream: true })) kinds.push(event.type);
    const offered = { type: "function", function: { name: "add", description: about, parameters: schema } };
    const called = await api.chat.completions.create({ ...asked, messages, tools: [offered], tool_choice: "required" });
    const run = api.chat.completions.runTools({
      ...asked,
      messages: [{ role: "user", content: SUM }],
      tools: [{ type: "function", function: { ...offered.function, parse: JSON.parse, function: add } }],
    });
    const input = [{ role: "user", content: SUM }];
    const tools = [{ type: "function", name: "add", description: about, parameters: schema, strict: false }];
    const first = await api.responses.create({ ...asked, input, tools });
    const call = first.output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: add(JSON.parse(call.arguments)) };
    const second = await api.responses.create({ ...asked, input: [result], previous_response_id: first.id, tools });
    const parsed = await api.chat.completions.parse({ ...asked, messages, response_format: zodResponseFormat(Pet, "pet") });
    const parsedToo = await api.responses.parse({ ...asked, input: QUESTION, text: { format: zodTextFormat(Pet, "pet") } });
    const completed = await api.completions.create({ ...asked, prompt: QUESTION, max_tokens: 4 });
    const embedded = await api.embeddings.create({ model: "demo", input: ["one", "two"] });
    let refused = 0;
    await api.chat.completions.create({ model: "other", messages }).catch((error) => (refused = error.status));
    return {
      whole: whole.choices[0].message.content,
      streamed,
      response: response.output_text,
      last: kinds.at(-1),
      call: called.choices[0].message.tool_calls[0].function.name,
      answers: [await run.finalContent(), second.output_text],
      kinds: [parsed.choices[0].message.parsed.kind, parsedToo.output_parsed.kind],
      completed: completed.choices[0].text,
      lengths: embedded.data.map((entry) => Math.hypot(...entry.embedding)),
      refused,
    };
  },
  // its default: /v1/responses
  "@ai-sdk/openai": () => withModel(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("demo")),
  "@ai-sdk/openai, chat": () => withModel(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat("demo")),
  async "@ai-sdk/openai-compatible"() {
    const provider = createOpenAICompatible({ name: "weft", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
    const model = provider.embeddingModel("demo");
    const { embeddings } = await embedMany({ model, values: ["one", "two"] });
    return { ...(await withModel(provider("demo"))), embeddings: embeddings.length };
  },
  "@ai-sdk/anthropic": () => withModel(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("demo")),
  async "@anthropic-ai/sdk"() {
    const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const asked = { model: "demo", max_tokens: 60, messages: [{ role: "user", content: QUESTION }] };
    const whole = await client.messages.create(asked);
    const streamed = await client.messages.stream(asked).finalText();
    const tools = [{ name: "add", description: about, input_schema: schema }];
    const called = await client.messages.create({ ...asked, tools, tool_choice: { type: "any" } });
    const call = called.content.find((block) => block.type === "tool_use");
    const said = [...asked.messages, { role: "assistant", content: [call] }];
    said.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "42" }] });
    const answer = await client.messages.create({ ...asked, messages: said, tools });
    const counted = await client.messages.countTokens({ model: "demo", messages: asked.messages });
    return { whole: whole.content[0].text, streamed, call: call.name, answer: answer.content[0].text, counted: counted.input_tokens };
  },
};
console.log(JSON.stringify(await clients[name]()));
