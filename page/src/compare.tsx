// Two sessions, usually of one group, side by side from their first difference.

import { useMemo, useState } from "preact/hooks"
import { path } from "./api"
import { MessageView } from "./conversation"
import { link, useGet, type Place } from "./hooks"
import { failedCalls, type Message, type Session, type Turn } from "./model"
import { count, line, number, plural, seconds, visible } from "./text"
import { useTurns } from "./session"
import { Failed, Loading, Panel, Reward, Scroll, StateBadge } from "./ui"

interface Item {
    message: Message
    sampled: boolean
    turn: Turn
}
/** The messages of the session's main conversation in order. */
function itemsOf(turns: Turn[]): Item[] {
    const own = turns.filter((turn) => turn.kind === "main" && !turn.model)
    return own.flatMap((turn) => {
        const tokens = turn.tokens
        if (!tokens) return [
            { message: { role: "user", content: turn.context }, sampled: false, turn }, { message: { role: "assistant", content: turn.sampled }, sampled: true, turn },
        ]
        return [...tokens.messages.map((message) => ({ message, sampled: false, turn })), ...(tokens.reply ? [{ message: tokens.reply, sampled: true, turn }] : [])]
    })
}
/** A message as one text, without ids of tool calls, which differ by chance. */
function textOf(message: Message): string {
    const calls = (message.tool_calls ?? []).map((call) => `${call.name}(${call.arguments})`)
    return [message.role, message.reasoning ?? "", message.content ?? "", ...calls].join("\n")
}
const plain = (message: Message) => [message.reasoning ?? "", message.content ?? "", ...(message.tool_calls ?? []).map((call) => `${call.name}(${call.arguments})`)].filter(Boolean).join("\n")

function parting(a: string, b: string): number {
    let at = 0
    while (at < a.length && at < b.length && a[at] === b[at]) at++
    // the first difference is moved to the beginning of its word
    while (at > 0 && /\w/.test(a[at - 1] ?? "") && /\w/.test((a[at] ?? "") + (b[at] ?? ""))) at--
    return at
}

function Side({ session, items, from, at }: { session: Session; items: Item[]; from: number; at: number }) {
    const first = items[from]
    const text = first ? plain(first.message) : ""
    return (
        <div class="side">
            <h3><a href={link(["sessions", session.id])}>sample {session.sample_index}</a> <StateBadge session={session} /></h3>
            {first ? (
                <div class={`message ${first.message.role}${first.sampled ? " own" : ""} parts`}>
                    <div class="role"><b>{first.message.role}</b><span class="dim">turn {first.turn.index}{first.sampled ? ", sampled" : ""}</span></div>
                    <pre dir="ltr"><span class="same">{at > 400 ? "…" : ""}{visible(text.slice(Math.max(0, at - 400), at))}</span><mark>{visible(text.slice(at, at + 4000)) || "(ends here)"}</mark>{text.length > at + 4000 ? ` … ${count(text.length - at - 4000)} more characters` : ""}</pre>
                </div>
            ) : <p class="note">This session ends here.</p>}
            {items.slice(from + 1).map((item, at) => <MessageView key={at} message={item.message} sampled={item.sampled} />)}
        </div>
    )
}

export function Compare({ ids }: { ids: [string, string]; place: Place }) {
    const [left, right] = [useGet<Session>(path("sessions", ids[0])), useGet<Session>(path("sessions", ids[1]))]
    const [a, b] = [useTurns(ids[0], false), useTurns(ids[1], false)]
    const [open, setOpen] = useState(false)
    const found = useMemo(() => {
        if (!a.data || !b.data) return null
        const [ones, twos] = [itemsOf(a.data.turns), itemsOf(b.data.turns)]
        let from = 0
        while (from < ones.length && from < twos.length && textOf(ones[from].message) === textOf(twos[from].message)) from++
        const at = ones[from] && twos[from] ? parting(plain(ones[from].message), plain(twos[from].message)) : 0
        return { ones, twos, from, at }
    }, [a.data, b.data])
    const fault = left.error ?? right.error ?? (a.data ? null : a.error) ?? (b.data ? null : b.error)
    if (fault && !(fault.status === 403)) return <main id="main" tabIndex={-1}><h1>Compare</h1><Failed error={fault} what="The sessions" /></main>
    if (!left.data || !right.data || !found) return <main id="main" tabIndex={-1}><h1>Compare</h1><Loading what="the sessions" /></main>
    const [one, two] = [left.data, right.data]
    const together = found.from >= found.ones.length && found.from >= found.twos.length
    const where = found.ones[found.from] ?? found.twos[found.from]
    const rows: [string, (session: Session) => preact.ComponentChildren][] = [
        ["Ended by", (session) => <StateBadge session={session} />],
        ["Reward", (session) => <Reward value={session.result?.verdict?.reward} />],
        ["Turns", (session) => count(session.result?.turns)],
        ["Sampled tokens", (session) => count(session.result?.tokens?.sampled)],
        ["Model time", (session) => seconds(session.result?.model_seconds)],
        ["Whole time", (session) => seconds(session.updated - session.created)],
        ["Verdict", (session) => line(session.result?.verdict?.reason ?? "–", 160)],
        ["Metrics", (session) => Object.entries(session.result?.verdict?.metrics ?? {}).map(([name, value]) => `${visible(name)} ${number(value)}`).join(", ") || "–"],
        ["Failed model calls", (session) => count(failedCalls(session.result) || null)],
        ["Error", (session) => (session.result?.error ? `${line(session.result.error.code, 60)}: ${line(session.result.error.message, 120)}` : "–")],
    ]
    return (
        <main id="main" tabIndex={-1}>
            <header class="title">
                <div>
                    <p class="crumbs"><a href="#/groups">Groups</a> / <a href={link(["groups", one.group_id])}>{one.group_id}</a></p>
                    <h1>Sample {one.sample_index} and sample {two.sample_index}</h1>
                </div>
            </header>
            {one.group_id !== two.group_id && <p class="note">These sessions are of different groups: their tasks may differ.</p>}
            <Panel title="Outcome" flush>
                <Scroll label="Outcome of both"><table class="plain pair">
                    <thead><tr><th><span class="hidden">Field</span></th>{[one, two].map((each) => <th key={each.id}><a href={link(["sessions", each.id])}>{each.id}</a></th>)}</tr></thead>
                    <tbody>{rows.filter(([, cell]) => cell(one) !== "–" || cell(two) !== "–").map(([name, cell]) => <tr key={name}><th>{name}</th><td>{cell(one)}</td><td>{cell(two)}</td></tr>)}</tbody>
                </table></Scroll>
            </Panel>
            <Panel title="Where they part" id="parting" aside={found.from > 0 && <button type="button" class="quiet" aria-expanded={open} onClick={() => setOpen(!open)}>{open ? "hide" : "show"} the {plural(found.from, "common message")}</button>}>
                {open && <div class="common">{found.ones.slice(0, found.from).map((item, at) => <MessageView key={at} message={item.message} sampled={item.sampled} />)}</div>}
                <p class="parting" role="status">
                    {together ? `The conversations are the same: ${plural(found.from, "message")}.`
                        : `After ${plural(found.from, "common message")}, in turn ${where!.turn.index}, ${where!.sampled ? "in what the model sampled" : "in what the model was shown"}.`}
                </p>
                {!together && (
                    <div class="sides">
                        <Side session={one} items={found.ones} from={found.from} at={found.at} />
                        <Side session={two} items={found.twos} from={found.from} at={found.at} />
                    </div>
                )}
            </Panel>
        </main>
    )
}
