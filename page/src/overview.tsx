// The overview of a running service: sessions, curves, lanes, engines, errors by cause, rewards by label.

import { useMemo } from "preact/hooks"
import { recorded, withQuery } from "./api"
import { Chart, type Curve } from "./charts"
import { Findings } from "./findings"
import { link, setQuery, useEvents, useGet, type Place } from "./hooks"
import type { GroupSummary, Rates, Session, Status } from "./model"
import { ago, count, line, plural, seconds, visible } from "./text"
import { Badge, Empty, Failed, Loading, Missing, Panel, Progress, Reward, Scroll, StateBadge } from "./ui"

const NEWEST = 300
const sum = (values: number[]) => values.reduce((all, each) => all + each, 0)

export function Overview({ place, theme }: { place: Place; theme: string }) {
    const status = useGet<Status>("/v1/status", 2000)
    const rates = useGet<Rates>("/v1/rates", 5000)
    const running = useGet<{ sessions: Session[] }>(withQuery("/v1/sessions", { state: "running", limit: 12 }), 5000)
    const newest = useGet<{ sessions: Session[] }>(withQuery("/v1/sessions", { limit: NEWEST }), 20000)
    const groups = useGet<{ groups: GroupSummary[] }>(withQuery("/v1/groups", { limit: 200 }), 20000)
    useEvents((event) => event.kind.startsWith("session."), () => { status.again(); running.again() }, 1000)
    useEvents((event) => event.kind === "group.done" || event.kind === "session.done", () => { newest.again(); groups.again() }, 5000)
    if (!status.data) return <main id="main" tabIndex={-1}><h1 class="hidden">Overview</h1>{status.error ? status.error.notServed ? newest.data ? <Finished newest={newest.data.sessions} /> : <Missing reply={newest} what="the sessions" /> : <Failed error={status.error} what="The status" /> : <Loading what="the status" />}</main>
    const it = status.data, states = it.sessions
    const busy = (states.running ?? 0) + (states.initializing ?? 0) + (states.ready ?? 0) + (states.evaluating ?? 0)
    const engines = it.engines.filter((engine) => !engine.serves)
    const last = rates.data?.points.at(-1)
    const step = rates.data?.step_seconds || 1
    return (
        <main id="main" tabIndex={-1} class="overview">
            <h1 class="hidden">Overview</h1>
            <dl class="tiles">
                <div><dt>Under way</dt><dd>{count(busy)} <small>{count(states.running ?? 0)} running, {count(states.evaluating ?? 0)} graded</small></dd></div>
                <div><dt>Queue</dt><dd>{count(states.queued ?? 0)} <small>sessions</small></dd></div>
                <div><dt>Done</dt><dd>{count(states.done ?? 0)} <small>sessions</small></dd></div>
                {last && <div><dt>Sessions per minute</dt><dd>{count(((last.sessions_done ?? 0) / step) * 60)}</dd></div>}
                {last && <div><dt>Tokens per second</dt><dd>{count((last.tokens_sampled ?? 0) / step)}</dd></div>}
                <div><dt>Engines</dt><dd>{engines.filter((engine) => engine.ok).length}/{engines.length} <small>answer</small></dd></div>
                <div><dt>Policy</dt><dd>{it.policy.version} <small>{it.policy.paused ? `paused: ${it.policy.paused}` : line(it.model, 24)}</small></dd></div>
            </dl>
            {it.failing.length > 0 && (
                <div class="failed" role="alert">{it.failing.map((each) => <span key={`${each.name} ${each.node}`}><b>{each.name}{each.node ? ` on ${visible(each.node)}` : ""}</b> fails since {plural(each.count, "try")}: {line(each.error, 200)}</span>)}</div>
            )}
            <Panel title="The last hour">{rates.data ? <Curves rates={rates.data} theme={theme} /> : <Missing reply={rates} what="the curves" />}</Panel>
            <div class="columns">
                <Panel title="Running now" flush aside={<a href={link(["sessions"], { state: "running" })}>all {count(states.running ?? 0)}</a>}>
                    {!running.data ? <Missing reply={running} what="the running sessions" /> : running.data.sessions.length ? (
                        <ul class="rows">{running.data.sessions.slice(0, 10).map((session) => (
                            <li key={session.id}><a class="id" href={link(["sessions", session.id])}>{session.id}</a><StateBadge session={session} /><span class="dim">{seconds(Date.now() / 1000 - session.updated)}</span></li>
                        ))}</ul>
                    ) : <Empty>{busy ? "Sessions are being prepared or graded." : "Nothing runs."}</Empty>}
                </Panel>
                <Panel title="Errors by cause" flush aside={newest.data && <span class="dim">of the newest {count(newest.data.sessions.length)} sessions</span>}>
                    {newest.data ? <Errors sessions={newest.data.sessions} /> : <Missing reply={newest} what="the newest sessions" />}
                </Panel>
                <Panel title="Newest groups" flush aside={<a href="#/groups">all</a>}>
                    {!groups.data ? <Missing reply={groups} what="the newest groups" /> : groups.data.groups.length ? (
                        <ul class="rows">{groups.data.groups.slice(0, 8).map((group) => (
                            <li key={group.id}><a class="id" href={link(["groups", group.id])}>{group.id}</a><Progress done={group.done} of={group.n} bad={group.errors} /><Reward value={group.mean_reward} /><span class="dim">{ago(group.created)}</span></li>
                        ))}</ul>
                    ) : <Empty>There are no groups yet.</Empty>}
                </Panel>
                <Lanes status={it} />
            </div>
            {groups.data ? <Rewards place={place} theme={theme} groups={groups.data.groups} sessions={newest.data?.sessions ?? []} />
                : <Panel title="Rewards"><Missing reply={groups} what="the rewards" /></Panel>}
            <Findings params={{}} what="all groups" />
            <Engines status={it} />
        </main>
    )
}

/** The overview of a finished run, which has no service. */
function Finished({ newest }: { newest: Session[] }) {
    const rewards = newest.flatMap((session) => (session.result?.verdict ? [session.result.verdict.reward] : []))
    return (
        <>
            <dl class="tiles">
                <div><dt>Sessions</dt><dd>{count(newest.length)}{newest.length >= NEWEST ? "+" : ""}</dd></div>
                <div><dt>Mean reward</dt><dd><Reward value={rewards.length ? sum(rewards) / rewards.length : null} />{newest.length >= NEWEST && <small> of the newest {newest.length}</small>}</dd></div>
                <div class="wide"><dt>Service</dt><dd><small>none: this is a finished run</small></dd></div>
            </dl>
            {!recorded && <div class="columns">
                <Panel title="Errors by cause" flush><Errors sessions={newest} /></Panel>
                <Panel title="Newest sessions" flush aside={<a href="#/sessions">all</a>}>
                    <ul class="rows">{newest.slice(0, 12).map((session) => <li key={session.id}><a class="id" href={link(["sessions", session.id])}>{session.id}</a><StateBadge session={session} /><Reward value={session.result?.verdict?.reward} /></li>)}</ul>
                </Panel>
            </div>}
        </>
    )
}

function Curves({ rates, theme }: { rates: Rates; theme: string }) {
    const { at, charts } = useMemo(() => {
        const at = rates.points.map((point) => point.at), step = rates.step_seconds || 1
        const per = (name: string, seconds = 1) => rates.points.map((point) => (point[name] === undefined ? null : (point[name] / step) * seconds))
        const level = (name: string) => rates.points.map((point) => point[name] ?? null)
        const charts: [string, Curve[]][] = [
            ["Sessions per minute", [{ name: "done", values: per("sessions_done", 60), tone: "good", fill: true }, { name: "failed", values: per("sessions_failed", 60), tone: "bad" }]],
            ["Tokens per second", [{ name: "sampled", values: per("tokens_sampled"), tone: "accent", fill: true }]],
            ["Sessions now", [{ name: "running", values: level("running"), tone: "accent", fill: true }, { name: "queued", values: level("queued"), tone: "warn" }]],
            ["Model calls per second", [{ name: "calls", values: per("calls"), tone: "info", fill: true }]],
        ]
        return { at, charts }
    }, [rates])
    if (at.length < 2) return <Empty>The curves begin with the next points.</Empty>
    return <div class="charts">{charts.map(([title, curves]) => <Chart key={title} title={title} at={at} curves={curves} theme={theme} />)}</div>
}

function Errors({ sessions }: { sessions: Session[] }) {
    const causes = new Map<string, { n: number; boundary: string; example: Session; message: string }>()
    for (const session of sessions) {
        const error = session.result?.error
        if (!error) continue
        const known = causes.get(error.code)
        if (known) known.n++
        else causes.set(error.code, { n: 1, boundary: error.boundary, example: session, message: error.message })
    }
    if (!causes.size) return <Empty>No errors.</Empty>
    return (
        <ul class="rows errors">
            {[...causes].sort((a, b) => b[1].n - a[1].n).slice(0, 10).map(([code, cause]) => (
                <li key={code}>
                    <b class="num">{cause.n}</b><Badge name={cause.boundary} tone="bad" />
                    <a href={link(["sessions"], { stop_reason: "error", error: code })}>{visible(code)}</a>
                    <span class="dim message-line" title={line(cause.message, 500)}>{line(cause.message, 100)}</span>
                    <a class="example" href={link(["sessions", cause.example.id])}>example</a>
                </li>
            ))}
        </ul>
    )
}

function Lanes({ status }: { status: Status }) {
    return (
        <Panel title="Nodes and lanes" flush>
            <Scroll label="Lanes"><table class="plain">
                <thead><tr><th>Node</th><th>Lane</th><th>In use</th><th class="num">Waiting</th><th class="num">Mean wait</th></tr></thead>
                <tbody>{status.nodes.flatMap((node) => node.lanes.map((lane, at) => (
                    <tr key={`${node.name} ${lane.name}`}>
                        <td>{at === 0 && <>{visible(node.name)} {node.drained && <Badge name="drained" />}</>}</td><td>{lane.name}</td>
                        <td><Progress done={lane.in_use} of={lane.size} /></td><td class="num">{count(lane.waiting)}</td><td class="num dim">{lane.served ? seconds(lane.waited_seconds / lane.served) : "–"}</td>
                    </tr>
                )))}</tbody>
            </table></Scroll>
        </Panel>
    )
}

function Engines({ status }: { status: Status }) {
    return (
        <Panel title="Engines" flush>
            {status.engines.length ? (
                <Scroll label="List of engines"><table class="plain">
                    <thead><tr><th>Engine</th><th>Kind</th><th>State</th><th class="num">In flight</th><th class="num">Sessions</th><th class="num">Tokens</th><th class="num">Failures</th><th class="num">Version</th><th>Remarks</th></tr></thead>
                    <tbody>{status.engines.map((engine) => (
                        <tr key={`${engine.serves} ${engine.name}`}>
                            <td>{visible(engine.name)}{engine.serves && <small class="dim"> {visible(engine.serves)}</small>}</td><td class="dim">{engine.kind}</td>
                            <td><Badge name={!engine.ok ? "no answer" : engine.suspect ? "suspect" : engine.draining ? "draining" : "answers"} tone={!engine.ok ? "bad" : engine.suspect || engine.draining ? "warn" : "good"} /></td>
                            <td class="num">{engine.in_flight}</td><td class="num">{count(engine.sessions)}</td><td class="num">{count(engine.generated_tokens)}</td><td class="num">{engine.failures || "–"}</td><td class="num">{engine.version}</td>
                            <td class="what dim">{line(engine.suspect ?? engine.advice ?? (engine.ok ? "" : engine.detail), 160)}</td>
                        </tr>
                    ))}</tbody>
                </table></Scroll>
            ) : <Empty>No engine is attached: outrider engines add</Empty>}
        </Panel>
    )
}

const TONES = ["accent", "warn", "info", "good", "bad", "violet"]
function Rewards({ place, theme, groups, sessions }: { place: Place; theme: string; groups: GroupSummary[]; sessions: Session[] }) {
    const names = useMemo(() => {
        const uses = new Map<string, number>()
        for (const group of groups) for (const name of Object.keys(group.labels)) uses.set(name, (uses.get(name) ?? 0) + 1)
        return [...uses].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).slice(0, 30).map(([name]) => name)
    }, [groups])
    const asked = place.query.get("by") ?? ""
    const by = names.includes(asked) ? asked : names[0] ?? ""
    const { at, curves, rows } = useMemo(() => {
        const spreads = new Map<string, number[]>(), seen = new Map<string, number>()
        for (const session of sessions) {
            seen.set(session.group_id, (seen.get(session.group_id) ?? 0) + 1)
            if (!session.result?.verdict) continue
            const known = spreads.get(session.group_id) ?? []
            known.push(session.result.verdict.reward)
            spreads.set(session.group_id, known)
        }
        const values = new Map<string, GroupSummary[]>()
        for (const group of groups) {
            if (group.mean_reward === null) continue
            const value = by ? group.labels[by] ?? "(none)" : "all groups"
            values.set(value, [...(values.get(value) ?? []), group])
        }
        const order = [...values].sort((a, b) => b[1].length - a[1].length).slice(0, 24)
        const rows = order.map(([value, own]) => {
            const known = own.filter((group) => seen.get(group.id) === group.n).map((group) => spreads.get(group.id)).filter((each): each is number[] => each !== undefined && each.length > 1)
            return { value, n: own.length, mean: sum(own.map((group) => group.mean_reward!)) / own.length, flat: known.length ? known.filter((each) => new Set(each).size === 1).length / known.length : null }
        })
        const ended = groups.filter((group) => group.mean_reward !== null).map((group) => ({ group, at: group.finished ?? group.created })).sort((a, b) => a.at - b.at)
        const curves: Curve[] = order.slice(0, 6).map(([value], number) => ({
            name: line(value, 24), tone: TONES[number], points: true,
            values: ended.map(({ group }) => ((by ? group.labels[by] ?? "(none)" : "all groups") === value ? group.mean_reward : null)),
        }))
        return { at: ended.map((each) => each.at), curves, rows }
    }, [groups, sessions, by])
    return (
        <Panel title="Rewards" aside={names.length > 0 && (
            <label class="by">by label <select value={by} onChange={(event) => setQuery(place, { by: event.currentTarget.value })}>{names.map((name) => <option key={name} value={name}>{line(name, 40)}</option>)}</select></label>
        )}>
            {rows.length ? (
                <div class="rewards">
                    {at.length > 1 ? <Chart title="Mean reward of a group, by the time of its end" at={at} curves={curves} theme={theme} height={170} /> : <Empty>A curve needs two groups with a reward.</Empty>}
                    <Scroll label="Rewards by label"><table class="plain">
                        <thead><tr><th>{by ? line(by, 24) : "Groups"}</th><th class="num">Groups</th><th>Mean reward</th><th class="num" title="Share of the groups whose sessions all have the same reward">No spread</th></tr></thead>
                        <tbody>{rows.map((row) => (
                            <tr key={row.value}><td>{by ? <a href={link(["groups"], { label: `${by}=${row.value}` })}>{line(row.value, 40)}</a> : row.value}</td><td class="num">{count(row.n)}</td><td><Reward value={row.mean} /></td><td class="num">{row.flat === null ? "–" : `${Math.round(row.flat * 100)} %`}</td></tr>
                        ))}</tbody>
                    </table></Scroll>
                </div>
            ) : <Empty>No group has a reward yet.</Empty>}
        </Panel>
    )
}
