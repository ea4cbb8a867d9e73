// The npm clients against a daemon: node clients.mjs NAME URL. Prints what it got as JSON; throws where a client does.
import { createOpenAI } from "@ai-sdk/openai";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const [, , name, url] = process.argv;
const QUESTION = "What is 12 + 30?";
const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const sdk = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });

const clients = {
  async openai() {
    const messages = [{ role: "user", content: QUESTION }];
    const whole = await api.chat.completions.create({ model: "demo", messages, temperature: 0 });
    let streamed = "";
    for await (const chunk of await api.chat.completions.create({ model: "demo", messages, temperature: 0, stream: true })) {
      streamed += chunk.choices[0]?.delta?.content ?? "";
    }
    const response = await api.responses.create({ model: "demo", input: QUESTION, temperature: 0 });
    const kinds = [];
    for await (const event of await api.responses.create({ model: "demo", input: QUESTION, temperature: 0, stream: true })) {
      kinds.push(event.type);
    }
    const offered = { type: "function", function: { name: "now", parameters: schema } };
    const called = await api.chat.completions.create({ model: "demo", messages, tools: [offered], tool_choice: "required" });
    const embedded = await api.embeddings.create({ model: "demo", input: ["one", "two"] });
    let refused = 0;
    await api.chat.completions.create({ model: "other", messages }).catch((error) => (refused = error.status));
    return {
      whole: whole.choices[0].message.content,
      streamed,
      response: response.output_text,
      last: kinds.at(-1),
      call: called.choices[0].message.tool_calls[0].function,
      lengths: embedded.data.map((entry) => Math.hypot(...entry.embedding)),
      refused,
    };
  },
  async "@ai-sdk/openai"() {
    // its defaults: /v1/responses
    const model = sdk("demo");
    const whole = await generateText({ model, prompt: QUESTION, temperature: 0 });
    let streamed = "";
    for await (const text of streamText({ model, prompt: QUESTION, temperature: 0 }).textStream) streamed += text;
    const now = tool({ description: "the time", inputSchema: jsonSchema(schema) });
    const called = await generateText({ model, prompt: QUESTION, tools: { now }, toolChoice: "required" });
    const chat = await generateText({ model: sdk.chat("demo"), prompt: QUESTION, temperature: 0 });
    return { whole: whole.text, streamed, call: called.toolCalls[0], chat: chat.text };
  },
  async "@anthropic-ai/sdk"() {
    const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
    const asked = { model: "demo", max_tokens: 60, temperature: 0, messages: [{ role: "user", content: QUESTION }] };
    const whole = await client.messages.create(asked);
    const streamed = await client.messages.stream(asked).finalText();
    const tools = [{ name: "now", input_schema: schema }];
    const called = await client.messages.create({ ...asked, tools, tool_choice: { type: "any" } });
    const counted = await client.messages.countTokens({ model: "demo", messages: asked.messages });
    const call = called.content.find((block) => block.type === "tool_use");
    return { whole: whole.content[0].text, streamed, call, counted: counted.input_tokens };
  },
};
console.log(JSON.stringify(await clients[name]()));
