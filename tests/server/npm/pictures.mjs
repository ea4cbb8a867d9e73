// The npm clients send pictures to a daemon: node pictures.mjs URL ASKED. ASKED is a file with the text of a question
// and `data:` URLs of its pictures. Prints the answers as JSON; throws where a client does.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateText } from "ai";
import OpenAI from "openai";

const [, , url, file] = process.argv;
const { text, pictures } = JSON.parse(readFileSync(file, "utf8"));
const asked = { model: "demo", temperature: 0 };
/** Numbered pictures, then the question. */
const content = (kind, picture) => [
  ...pictures.flatMap((data, i) => [{ type: kind, text: String(i + 1) }, picture(data)]),
  { type: kind, text },
];
const said = (of) => [{ role: "user", content: of }];
const answers = {};

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = content("text", (data) => ({ type: "image_url", image_url: { url: data } }));
const whole = await openai.chat.completions.create({ ...asked, max_tokens: 12, messages: said(chat) });
answers.chat = whole.choices[0].message.content;
const items = content("input_text", (data) => ({ type: "input_image", detail: "auto", image_url: data }));
answers.responses = (await openai.responses.create({ ...asked, max_output_tokens: 12, input: said(items) })).output_text;

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const blocks = content("text", (data) => ({
  type: "image",
  source: { type: "base64", media_type: "image/png", data: data.split(",")[1] },
}));
answers.messages = (
  await anthropic.messages.create({ model: "demo", max_tokens: 12, temperature: 0, messages: said(blocks) })
).content[0].text;

const models = {
  "ai-sdk openai": createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("demo"),
  "ai-sdk openai chat": createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).chat("demo"),
  "ai-sdk compatible": createOpenAICompatible({ name: "weft", baseURL: `${url}/v1` })("demo"),
  "ai-sdk anthropic": createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("demo"),
};
const parts = content("text", (data) => ({ type: "image", image: data.split(",")[1], mediaType: "image/png" }));
for (const [name, model] of Object.entries(models)) {
  answers[name] = (await generateText({ model, temperature: 0, maxOutputTokens: 12, messages: said(parts) })).text;
}
console.log(JSON.stringify(answers));
