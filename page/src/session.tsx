// One session: its outcome, its timeline, its branches, and its conversation as messages or tokens.

import { useEffect, useMemo, useRef, useState } from "preact/hooks"
import { ApiError, cancel, get, getBlob, hasToken, path, recorded, withQuery } from "./api"
import { Branches } from "./branches"
import { TurnView } from "./conversation"
import { link, setQuery, useEvents, useGet, useKeys, type Place } from "./hooks"
import { failedCalls, turnKey, type Artifacts, type Sample, type Session as SessionRecord, type Timeline as Record_, type Turn } from "./model"
import { ago, bytes, clock, count, line, number, plural, seconds, visible } from "./text"
import { fromTurns, Timeline } from "./timeline"
import { fates, LEGENDS, type Colour } from "./tokens"
import { Badge, Choice, Confirm, Copy, ErrorBox, Failed, Labels, Loading, LongText, Panel, Reward, Scroll, StageBar, StateBadge, STAGES } from "./ui"

const MODES = [["messages", "Messages"], ["tokens", "Tokens"]] as const
const COLOURS = [["origin", "Origin"], ["logprob", "Log-probability"], ["version", "Version"]] as const

/** The turns with their tokens; as text only, if the user's token may not read the tokens of turns. */
export function useTurns(id: string, live: boolean) {
    const [textOnly, setTextOnly] = useState(false)
    const url = withQuery(path("sessions", id, "turns"), textOnly ? {} : { tokens: true, pieces: true })
    const found = useGet<{ turns: Turn[] }>(url, live ? 1500 : 0)
    useEffect(() => {
        if (found.error?.status === 403 && !textOnly) setTextOnly(true)
    }, [found.error])
    return { ...found, textOnly }
}

export function Session({ id, place }: { id: string; place: Place }) {
    const session = useGet<SessionRecord>(path("sessions", id))
    const live = session.data !== null && session.data.state !== "done" && !recorded
    const turns = useTurns(id, live)
    const [attempt, setAttempt] = useState<string>("")
    const timeline = useGet<Record_>(withQuery(path("sessions", id, "timeline"), { attempt }), live ? 1500 : 0)
    const ended = session.data?.state === "done"
    const samples = useGet<{ samples: Sample[] }>(ended ? path("sessions", id, "samples") : null)
    const again = () => { session.again(); turns.again(); timeline.again() }
    useEvents((event) => event.session_id === id, again, 250)
    const [chosen, choose] = useState<string | null>(null)
    const [follow, setFollow] = useState(true)
    const mode = (place.query.get("as") === "tokens" ? "tokens" : "messages") as "messages" | "tokens"
    const colour = (COLOURS.find(([name]) => name === place.query.get("colour"))?.[0] ?? "origin") as Colour
    const list = turns.data?.turns ?? []
    const fate = useMemo(() => fates(samples.data?.samples ?? null), [samples.data])
    const jump = (key: string) => {
        choose(key)
        document.getElementById(`turn-${key}`)?.scrollIntoView({ block: "start" })
    }
    const step = (by: number) => {
        const at = list.findIndex((turn) => turnKey(turn) === chosen)
        const next = list[Math.max(0, Math.min(list.length - 1, at + by))]
        if (next) jump(turnKey(next))
    }
    useKeys({
        j: () => step(1), k: () => step(-1), t: () => setQuery(place, { as: mode === "tokens" ? undefined : "tokens" }),
        u: () => session.data && !recorded && (location.hash = link(["groups", session.data.group_id])),
    })
    const end = useRef<HTMLDivElement>(null)
    useEffect(() => {
        if (live && follow && list.length) end.current?.scrollIntoView({ block: "end" })
    }, [list.length, live, follow])

    if (!session.data) return (
        <main id="main" tabIndex={-1}><h1 class="hidden">Session</h1>{session.error ? <Failed error={session.error} what={`Session ${id}`} /> : <Loading what="the session" />}</main>
    )
    const it = session.data, result = it.result
    const spans = timeline.data?.spans.length ? timeline.data.spans : fromTurns(it, list)
    const now = live ? timeline.data?.now ?? Date.now() / 1000 : it.updated
    return (
        <main id="main" tabIndex={-1} class="session">
            <header class="title">
                <div>
                    <p class="crumbs">{recorded ? it.group_id : <><a href="#/groups">Groups</a> / <a href={link(["groups", it.group_id])}>{it.group_id}</a></>} / sample {it.sample_index}</p>
                    <h1>{it.id} <StateBadge session={it} />{live && <span class="livemark">live</span>}</h1>
                    {result?.labels && <Labels labels={result.labels} />}
                </div>
                <Actions session={it} turns={list} live={live} after={again} follow={follow} setFollow={setFollow} />
            </header>
            <Outcome session={it} />
            {result?.error && <Panel title="Error"><ErrorBox error={result.error} /></Panel>}
            {!result && it.last_error && <Panel title="Last error"><ErrorBox error={it.last_error} retried /></Panel>}
            {result?.harness_exit && <Panel title={`The agent's program exited with code ${result.harness_exit.code}`}><LongText text={result.harness_exit.log_tail} mono /></Panel>}
            <Panel title="Timeline" aside={!recorded && (timeline.data?.attempts.length ?? 0) > 1 && (
                <Choice label="Attempt" value={attempt || String(it.attempt)} onChange={setAttempt}
                    options={timeline.data!.attempts.map((each) => [String(each.attempt), `attempt ${each.attempt}`] as const)} />
            )}>
                {spans.length ? (
                    <Timeline spans={spans} now={now} live={live} left={timeline.data?.left_out}
                        note={timeline.error?.notServed ? "from the turns: this service has no timelines" : undefined}
                        choose={(model, turn) => jump(list.some((each) => each.model === model && each.index === turn) ? `${model}/${turn}` : String(turn))} />
                ) : timeline.error && !timeline.error.notServed ? <Failed error={timeline.error} what="The timeline" /> : <p class="note">{ended ? "The times of this session are not known." : "Nothing has happened yet."}</p>}
            </Panel>
            {turns.error && !turns.data && <Failed error={turns.error} what="The turns" />}
            {(list.length > 0 || !ended) && <div class="split">
                <Panel title="Branches" flush aside={<span class="dim">{plural(list.length, "turn")}</span>}>
                    {list.length ? <Branches turns={list} chosen={chosen} choose={jump} /> : <p class="note">No model calls{live ? " yet" : ""}.</p>}
                </Panel>
                <Panel title="Conversation" id="conversation" flush aside={
                    <>
                        {mode === "tokens" && <Choice label="Colour of the tokens" value={colour} options={COLOURS} onChange={(value) => setQuery(place, { colour: value === "origin" ? undefined : value })} />}
                        <Choice label="Form of the conversation" value={mode} options={MODES} onChange={(value) => setQuery(place, { as: value === "tokens" ? value : undefined })} />
                    </>
                }>
                    {mode === "tokens" && <Legend colour={colour} turns={list} sampled={samples.data !== null} />}
                    {mode === "tokens" && turns.textOnly && <p class="note">Tokens need a token of the service with the role submit.</p>}
                                        {!turns.data && !turns.error && <Loading what="the turns" />}
                    <div class="turns">
                        {list.map((turn) => (
                            <TurnView key={turnKey(turn)} turn={turn} mode={mode} colour={colour} fate={fate} chosen={chosen === turnKey(turn)}
                                reward={turn.model ? undefined : result?.verdict?.turns?.[turn.index]} />
                        ))}
                        {live && <p class="note pulse" role="status">{it.state === "running" ? "The agent is at work …" : `${it.state} …`}</p>}
                        <div ref={end} />
                    </div>
                </Panel>
            </div>}
            {ended && <Files session={it} />}
        </main>
    )
}

function Legend({ colour, turns, sampled }: { colour: Colour; turns: Turn[]; sampled: boolean }) {
    const versions = [...new Set(turns.flatMap((turn) => turn.versions.map((span) => span.version)))].sort((a, b) => a - b)
    const rows: [string, string][] = colour === "version" ? versions.slice(0, 12).map((version) => [`v${version % 6}`, `version ${version}`])
        : LEGENDS[colour].filter(([name]) => colour !== "origin" || name === "prompt" || (name === "sampled") !== sampled)
    return <div class="legend tokens-legend" aria-label="Legend">{rows.map(([name, text]) => <span key={text}><i class={`t ${name}`}>ab</i>{text}</span>)}</div>
}

const MOST_KINDS = 8 // kinds of failed calls that are shown unfolded
const Kinds = ({ calls }: { calls: [string, number][] }) => (
    <ul>{calls.map(([name, n]) => <li key={name}><span class="dim">{count(n)} ×</span> <code>{line(name, 120)}</code></li>)}</ul>
)

function Outcome({ session }: { session: SessionRecord }) {
    const result = session.result, tokens = result?.tokens
    const log = useLog(session)
    const most = STAGES.reduce((sum, name) => sum + (result?.seconds?.[name] ?? 0), 0)
    const failed = Object.entries(result?.failed_calls ?? {}).sort((a, b) => b[1] - a[1])
    return (
        <section class="outcome" aria-label="Outcome">
            <dl class="tiles">
                <div><dt>Reward</dt><dd>{result?.verdict ? <Reward value={result.verdict.reward} /> : "–"}</dd></div>
                <div><dt>Turns</dt><dd>{count(result?.turns)}</dd></div>
                <div><dt>Sampled</dt><dd>{count(tokens?.sampled)} <small>tokens</small></dd></div>
                <div class="broad"><dt>Trained</dt><dd>{count(tokens?.trained)}{tokens && (tokens.masked || tokens.dropped) ? <small> {count(tokens.masked)} masked, {count(tokens.dropped)} dropped</small> : <small> tokens</small>}</dd></div>
                <div><dt>Attempt</dt><dd>{session.attempt || "–"}{session.node && <small> on {line(session.node, 30)}</small>}</dd></div>
                <div class="wide"><dt>Time</dt><dd>{session.updated > session.created ? seconds(session.updated - session.created) : "–"} <small title={clock(session.updated)}>{ago(session.updated)}</small>{result?.seconds && <StageBar seconds={result.seconds} most={most} />}</dd></div>
            </dl>
            {result?.verdict && (result.verdict.reason || Object.keys(result.verdict.metrics ?? {}).length > 0 || log) && (
                <div class="verdict">
                    {result.verdict.reason && <p><b>Verdict</b> {line(result.verdict.reason, 600)}</p>}
                    {Object.entries(result.verdict.metrics ?? {}).length > 0 && (
                        <p class="metrics">{Object.entries(result.verdict.metrics!).map(([name, value]) => <span key={name}><span class="dim">{visible(name)}</span> {number(value)}</span>)}</p>
                    )}
                    {log && <details><summary>Evaluator's log <span class="dim">{count(log.length)} characters</span></summary><LongText text={log} mono /></details>}
                </div>
            )}
            {result?.answer && <div class="verdict"><p><b>Answer</b> {line(result.answer, 600)}</p></div>}
            {result && (Object.keys(result.forks ?? {}).length > 0 || Object.keys(result.ignored ?? {}).length > 0) && (
                <p class="remarks">
                    {Object.entries(result.forks ?? {}).map(([cause, n]) => <Badge key={cause} tone="warn" name={`${n} × fork: ${cause}`} />)}
                    {Object.entries(result.ignored ?? {}).map(([name, n]) => <Badge key={name} name={`ignored in ${plural(n, "turn")}: ${line(name, 60)}`} />)}
                </p>
            )}
            {failed.length > 0 && (
                <div class="verdict failedcalls">
                    <p><b>Failed model calls</b> {count(failedCalls(result))}</p>
                    <Kinds calls={failed.slice(0, MOST_KINDS)} />
                    {failed.length > MOST_KINDS && <details><summary>{plural(failed.length - MOST_KINDS, "more kind")}</summary><Kinds calls={failed.slice(MOST_KINDS)} /></details>}
                </div>
            )}
        </section>
    )
}

const GRADING_LOG = "outrider:grading.log"
const VIEWED = 1 << 20 // bytes of a file that are shown
const artifactUrl = (id: string, name: string) => `${path("sessions", id, "artifacts")}/${name.replace(/^\//, "").split("/").map(encodeURIComponent).join("/")}`

function useLog(session: SessionRecord): string {
    const [log, set] = useState("")
    useEffect(() => {
        if (!session.result?.artifact_bytes) return
        const control = new AbortController()
        getBlob(artifactUrl(session.id, GRADING_LOG), control.signal).then((blob) => blob.slice(0, VIEWED).text()).then(set, () => set(""))
        return () => control.abort()
    }, [session.id, session.state])
    return log
}

function save(blob: Blob, name: string) {
    const url = URL.createObjectURL(blob)
    const anchor = document.createElement("a")
    anchor.href = url
    anchor.download = visible(name.split("/").pop() ?? "").replace(/[^\w.@+ -]/g, "_").slice(-120) || "file"
    anchor.click()
    setTimeout(() => URL.revokeObjectURL(url), 10_000)
}

function Files({ session }: { session: SessionRecord }) {
    const files = useGet<Artifacts>(path("sessions", session.id, "artifacts"))
    const [open, setOpen] = useState<{ name: string; text: string } | null>(null)
    const [fault, setFault] = useState("")
    const asked = useRef("") // the file whose view was asked for last
    if (files.error) return files.error.status === 404 ? null : <Panel title="Files"><Failed error={files.error} what="The files" /></Panel>
    if (!files.data || (!files.data.artifacts.length && !files.data.left_out.length)) return null
    const view = (name: string) => {
        asked.current = name
        fetch_(name, async (blob) => {
            const text = await blob.slice(0, VIEWED).text()
            const cut = blob.size > VIEWED ? `: the first ${bytes(VIEWED)} of ${bytes(blob.size)}` : ""
            if (asked.current === name) setOpen({ name: `${visible(name)}${cut}`, text })
        })
    }
    const fetch_ = (name: string, then: (blob: Blob) => void) => {
        setFault("")
        getBlob(artifactUrl(session.id, name)).then(then, (error: Error) => setFault(error.message))
    }
    return (
        <Panel title="Files" flush aside={<span class="dim">{plural(files.data.artifacts.length, "file")} kept</span>}>
            {fault && <p class="fault" role="alert">{visible(fault)}</p>}
            <Scroll label="Files of the session"><table class="plain files">
                <thead><tr><th>File</th><th class="num">Size</th><th>SHA-256</th><th><span class="hidden">Actions</span></th></tr></thead>
                <tbody>
                    {files.data.artifacts.map((file) => (
                        <tr key={file.path}>
                            <td class="mono">{visible(file.path)}</td><td class="num">{bytes(file.size)}</td><td class="mono dim">{file.sha256.slice(0, 12)}</td>
                            <td class="num">
                                <button type="button" class="quiet" onClick={() => view(file.path)}>view</button>
                                <button type="button" class="quiet" onClick={() => fetch_(file.path, (blob) => save(blob, file.path))}>save</button>
                            </td>
                        </tr>
                    ))}
                    {files.data.left_out.map((each) => <tr key={`left ${each.path}`}><td class="mono dim">{visible(each.path) || "(others)"}</td><td colSpan={3} class="dim">left out: {line(each.reason, 200)}</td></tr>)}
                </tbody>
            </table></Scroll>
            {open && <div class="opened"><LongText label={open.name} text={open.text} mono /></div>}
        </Panel>
    )
}

/** A script for `outrider serve --engine scripted=FILE` with the policy's replies of this session. */
function replay(turns: Turn[]): string {
    return JSON.stringify({ replies: turns.filter((turn) => !turn.model).map((turn) => turn.sampled) }, null, 2)
}

function Actions({ session, turns, live, after, follow, setFollow }: {
    session: SessionRecord; turns: Turn[]; live: boolean; after: () => void; follow: boolean; setFollow: (follow: boolean) => void
}) {
    const [fault, setFault] = useState("")
    const url = `${location.origin}${path("sessions", session.id)}`
    const header = hasToken() ? ` -H "Authorization: Bearer $OUTRIDER_TOKEN"` : ""
    const whole = () => JSON.stringify({ session, turns }, null, 2)
    return (
        <div class="actions">
            {live && <label class="check"><input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> follow</label>}
            {live && <Confirm question="End this session?" act={() => cancel(path("sessions", session.id)).then(after)}>cancel</Confirm>}
            {fault && <span class="fault" role="alert">{visible(fault)}</span>}
            <details class="menu">
                <summary class="button">Copy …</summary>
                <div>
                    <Copy text={() => location.href}>Link</Copy>
                    <Copy text={whole} title="The session and its turns">JSON</Copy>
                    {!recorded && <Copy text={() => `curl${header} '${url}/turns?tokens=true'`} title="Reads the turns; the token is in a variable, not in the text">curl</Copy>}
                    <Copy text={() => `outrider show ${session.id} --html ${session.id}.html`} title="Writes this view to a file">outrider show</Copy>
                    <Copy text={() => replay(turns)} title="The replies as a script: outrider serve --engine scripted=FILE">Replay script</Copy>
                </div>
            </details>
        </div>
    )
}
