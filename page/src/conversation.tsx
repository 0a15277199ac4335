// The conversation of a session: messages or tokens, turn by turn.

import { useEffect, useMemo, useState } from "preact/hooks"
import { getBlob, path } from "./api"
import type { Message, Part, Turn } from "./model"
import { turnKey } from "./model"
import { bytes, count, line, plural, seconds, visible } from "./text"
import { TurnTokens, type Colour, type Origin } from "./tokens"
import { Badge, LongText } from "./ui"

export const KINDS: Record<string, string> = {
    main: "k-main", subagent: "k-sub", compaction: "k-comp", auxiliary: "k-aux", retry: "k-retry", aborted: "k-retry", unsure: "k-aux", frozen: "k-frozen",
}

function Picture({ part }: { part: Part }) {
    const [url, set] = useState<string | null>(null)
    const [fault, setFault] = useState("")
    useEffect(() => {
        if (part.url || !part.digest) return
        const control = new AbortController()
        let made = ""
        getBlob(path("images", part.digest), control.signal).then(
            (blob) => {
                if (!/^image\//.test(blob.type)) return setFault(`its media type is ${blob.type || "unknown"}`)
                made = URL.createObjectURL(blob)
                set(made)
            },
            (error: Error) => control.signal.aborted || setFault(error.message),
        )
        return () => {
            control.abort()
            if (made) URL.revokeObjectURL(made)
        }
    }, [part.digest])
    if (part.url) return <p class="note">An image at {visible(part.url.slice(0, 300))} (the page loads nothing from elsewhere)</p>
    if (fault) return <p class="note">An image that cannot be shown: {visible(fault)}</p>
    return (
        <figure class="picture">
            {url ? <img src={url} alt="An image of the conversation" onError={() => setFault("it is no picture that a browser can show")} /> : <span class="note">loading the image …</span>}
            <figcaption>{visible(part.media_type ?? "")} · {bytes(part.size ?? 0)} · {part.digest?.slice(0, 12)}</figcaption>
        </figure>
    )
}

const PIECE = /"[^"\\]*(?:\\.[^"\\]*)*"|[{[]\s*[}\]]|[{}[\],:]|\s+/g
const MOST_INDENTS = 20
const MOST_PRETTY = 1 << 20
/** JSON with a line for each value, and with the line breaks and quotes of its strings. Everything else stays as it is
 * written: JSON.stringify would round large numbers, and drop repeated names. */
function pretty(text: string): string {
    try {
        if (text.length > MOST_PRETTY) return text
        JSON.parse(text)
    } catch {
        return text
    }
    let depth = 0
    const newLine = () => `\n${"  ".repeat(Math.min(depth, MOST_INDENTS))}`
    return text.replace(PIECE, (piece) => {
        if (piece[0] === '"') return piece.replace(/\\(.)/g, (all, char) => (char === "n" ? "\n" : char === '"' ? char : all))
        if (piece.length > 1 && /[{[]/.test(piece)) return piece[0] + piece[piece.length - 1]
        if (piece === "{" || piece === "[") return depth++, piece + newLine()
        if (piece === "}" || piece === "]") return depth--, newLine() + piece
        return piece === "," ? piece + newLine() : piece === ":" ? ": " : ""
    })
}

function Arguments({ text }: { text: string }) {
    return <LongText text={useMemo(() => pretty(text), [text])} mono />
}

function Parts({ message }: { message: Message }) {
    if (!message.parts?.length) return message.content ? <LongText text={message.content} /> : null
    return (
        <>
            {message.parts.map((part, at) =>
                part.type === "image" ? <Picture key={at} part={part} /> : part.text ? <LongText key={at} text={part.text} /> : null)}
        </>
    )
}

export function MessageView({ message, sampled }: { message: Message; sampled?: boolean }) {
    const role = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "user"
    const long = (message.content?.length ?? 0) > 700 || (message.content ?? "").split("\n", 14).length > 12
    const head = <><b>{role}</b>{message.name && <code>{line(message.name, 80)}</code>}{message.tool_call_id && <span class="dim">{line(message.tool_call_id, 40)}</span>}</>
    const folded = (role === "tool" || role === "system") && long
    return (
        <div class={`message ${role}${sampled ? " own" : ""}`}>
            {folded ? (
                <details>
                    <summary><span class="role">{head}</span><span class="preview">{line(message.content ?? "", 110)}</span><span class="dim">{count(message.content!.length)} characters</span></summary>
                    <Parts message={message} />
                </details>
            ) : (
                <><div class="role">{head}</div>
                    {message.reasoning && (
                        <details class="reasoning"><summary>reasoning <span class="preview">{line(message.reasoning, 110)}</span></summary><LongText text={message.reasoning} /></details>
                    )}
                    <Parts message={message} /></>
            )}
            {message.tool_calls?.map((call, at) => (
                <details class="toolcall" key={at}>
                    <summary><span class="call"><b>{line(call.name, 80)}</b></span><span class="preview">{line(call.arguments, 110)}</span></summary>
                    <Arguments text={call.arguments} />
                </details>
            ))}
            {!message.content && !message.tool_calls?.length && !message.parts?.length && !message.reasoning && <p class="dim">(empty)</p>}
        </div>
    )
}

export function TurnView({ turn, mode, colour, fate, reward, chosen }: {
    turn: Turn; mode: "messages" | "tokens"; colour: Colour; fate: (turn: Turn, at: number) => Origin; reward?: number; chosen: boolean
}) {
    const timed = turn.timings.received > 0 // a file of samples has no times
    const worded = turn.tokens ? turn.tokens.messages.length > 0 || turn.tokens.reply !== null : false
    const took = turn.timings.finished - turn.timings.received
    const first = turn.timings.first_token === null ? null : turn.timings.first_token - turn.timings.received
    const key = turnKey(turn)
    const tokens = turn.tokens
    return (
        <article class={`turn ${KINDS[turn.kind] ?? "k-main"}${chosen ? " chosen" : ""}`} id={`turn-${key}`} aria-label={`turn ${key}`}>
            <header>
                <h3>{turn.model ? `${visible(turn.model)} ` : ""}turn {turn.index}</h3>
                {turn.kind !== "main" && <span class={`kind ${KINDS[turn.kind] ?? ""}`}>{turn.kind}{turn.label && `: ${line(turn.label, 40)}`}</span>}
                {turn.cause && <Badge name={`fork: ${turn.cause}`} tone="warn" title={turn.forked_from === null ? undefined : `from turn ${turn.forked_from}`} />}
                {turn.join === "retry" && <Badge name="retry" tone="warn" />}
                {turn.finish && turn.finish !== "stop" && <Badge name={turn.finish} tone={turn.finish === "abort" ? "bad" : "warn"} />}
                {turn.malformed_calls > 0 && <Badge name={plural(turn.malformed_calls, "malformed call")} tone="warn" />}
                {turn.drift_tokens > 0 && <Badge name={`${turn.drift_tokens} of drift`} tone="bad" />}
                {turn.altered && <Badge name="altered distribution" tone="warn" />}
                {reward !== undefined && <Badge name={`reward ${reward}`} tone="info" />}
                <span class="facts">
                    <span title="tokens of the prompt, of them cached, and sampled tokens">
                        {count(turn.prompt_tokens)}{turn.cached_tokens ? ` (${count(turn.cached_tokens)} cached)` : ""} → {count(turn.output_tokens)} tokens
                    </span>
                    {timed && <span title={first === null ? "no token was sampled" : `first token after ${seconds(first)}`}>{seconds(took)}</span>}
                    {turn.engine && <span title={`${turn.dialect} · ${turn.mode} mode`}>{line(turn.engine, 24)}</span>}
                </span>
            </header>
            {tokens && tokens.output_ids.length + tokens.prompt_delta.length > 0 && (mode === "tokens" || (!worded && !turn.context && !turn.sampled)) ? (
                <TurnTokens turn={turn} colour={colour} fate={fate} />
            ) : tokens && worded ? (
                <>
                    {tokens.messages.map((message, at) => <MessageView key={at} message={message} />)}
                    {tokens.reply ? <MessageView message={tokens.reply} sampled /> : <p class="note">The agent had hung up: it was given no reply. Sampled: {line(turn.sampled, 300)}</p>}
                </>
            ) : (
                <>
                    {turn.context && <div class="message user"><div class="role"><b>context</b></div><LongText text={turn.context} /></div>}
                    <div class="message assistant own"><div class="role"><b>sampled</b></div><LongText text={turn.sampled} /></div>
                </>
            )}
        </article>
    )
}
