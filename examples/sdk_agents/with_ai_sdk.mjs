// An agent of the Vercel AI SDK with one tool, in Chat Completions.
import { spawnSync } from "node:child_process";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, OUTRIDER_MODEL: name } = process.env;

const bash = tool({
  description: "Run a shell command, and return its output.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => {
    const done = spawnSync("bash", ["-c", command], { encoding: "utf8" });
    return `${done.stdout}${done.stderr}[exit code ${done.status}]`;
  },
});

const { text } = await generateText({
  model: createOpenAICompatible({ name: "outrider", baseURL, apiKey })(name),
  tools: { bash },
  stopWhen: stepCountIs(50),
  maxRetries: 0,
  prompt: process.argv[2],
});
console.log(text);
