// Small agents of JavaScript's frameworks, as each makes them. `frameworks.py` says the protocol.

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [name, packages] = process.argv.slice(2); // where npm installed the packages
const require = createRequire(join(packages, "x.js"));
const load = (module) => import(pathToFileURL(require.resolve(module)).href);
const NUM_TURNS = 5;

function calculator({ expression }) {
  const match = /^(\d+)([-+*])(\d+)$/.exec(String(expression).replaceAll(" ", ""));
  if (match === null) return "error: not a+b, a-b or a*b";
  const [a, b] = [Number(match[1]), Number(match[3])];
  return String({ "+": a + b, "-": a - b, "*": a * b }[match[2]]);
}

const schema = { type: "object", properties: { expression: { type: "string" } } };

async function openaiNode(prompt, baseURL, apiKey) {
  const { OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL, apiKey });
  const run = client.chat.completions.runTools({
    model: "policy",
    messages: [{ role: "user", content: prompt }],
    tools: [{
      type: "function",
      function: { name: "calculator", parameters: schema, parse: JSON.parse, function: calculator },
    }],
  }, { maxChatCompletions: NUM_TURNS });
  return await run.finalContent();
}

async function openaiAgentsJs(prompt, baseURL, apiKey) {
  const { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } = await load("@openai/agents");
  setTracingDisabled(true);
  const own = tool({
    name: "calculator", description: "c", strict: false,
    parameters: { ...schema, required: [], additionalProperties: true }, execute: calculator,
  });
  const runner = new Runner({ modelProvider: new OpenAIProvider({ baseURL, apiKey }) });
  const agent = new Agent({ name: "a", model: "policy", tools: [own] });
  return (await runner.run(agent, prompt, { maxTurns: NUM_TURNS })).finalOutput;
}

async function vercel(prompt, baseURL, apiKey, model) {
  const { generateText, jsonSchema, stepCountIs, tool } = await load("ai");
  const { createOpenAI } = await load("@ai-sdk/openai");
  const own = tool({ description: "c", inputSchema: jsonSchema(schema), execute: calculator });
  const { text } = await generateText({
    model: model(createOpenAI({ baseURL, apiKey })),
    tools: { calculator: own },
    stopWhen: stepCountIs(NUM_TURNS),
    prompt,
  });
  return text;
}

const AGENTS = {
  openai_node: ["openai", openaiNode],
  openai_agents_js: ["@openai/agents", openaiAgentsJs],
  vercel: ["ai", (...asked) => vercel(...asked, (provider) => provider("policy"))],
  vercel_chat: ["ai", (...asked) => vercel(...asked, (provider) => provider.chat("policy"))],
};

const [distribution, solve] = AGENTS[name];
console.log(require(join(packages, distribution, "package.json")).version);
for await (const line of createInterface({ input: process.stdin })) {
  let answer = "";
  try {
    answer = (await solve(...JSON.parse(line))) ?? "";
  } catch (error) { // an untrained model drives frameworks into errors of their own
    console.error(`${name}: ${error}`.slice(0, 300));
  }
  console.log(JSON.stringify([answer]));
}
