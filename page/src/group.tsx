// One group: its sessions side by side.

import { useMemo, useState } from "preact/hooks"
import { ApiError, cancel, path, post } from "./api"
import { Findings } from "./findings"
import { go, link, setQuery, useEvents, useGet, useKeys, type Place } from "./hooks"
import type { Group as GroupRecord, Session } from "./model"
import { ago, clock, count, line, number, seconds } from "./text"
import { Badge, Confirm, Failed, Labels, Loading, Panel, Progress, Reward, Scroll, StageBar, STAGES, StateBadge, What, classes } from "./ui"

async function again(id: string) {
    let reply: Response
    try {
        reply = await post("/v1/sessions/retry", { groups: [id] })
    } catch (error) {
        throw error instanceof ApiError && (error.notServed || error.status === 405) ? new Error("this service submits nothing again") : error
    }
    const { groups } = (await reply.json()) as { groups?: string[] }
    go(groups?.length === 1 ? link(["groups", groups[0]]) : "#/groups")
}

const total = (session: Session) => STAGES.reduce((sum, name) => sum + (session.result?.seconds?.[name] ?? 0), 0)
const SORTS: Record<string, (session: Session) => number | string> = {
    sample: (session) => session.sample_index,
    state: (session) => session.result?.stop_reason ?? session.state,
    reward: (session) => session.result?.verdict?.reward ?? -Infinity,
    turns: (session) => session.result?.turns ?? -1,
    tokens: (session) => session.result?.tokens?.sampled ?? -1,
    seconds: total,
}

export function Group({ id, place }: { id: string; place: Place }) {
    const group = useGet<GroupRecord>(path("groups", id))
    useEvents((event) => event.group_id === id, group.again, 400)
    const [picked, pick] = useState<string[]>([])
    const [active, setActive] = useState(-1)
    const sort = place.query.get("sort") ?? "sample"
    const down = sort.startsWith("-"), by = sort.replace("-", "")
    const sessions = useMemo(() => {
        const of = SORTS[by] ?? SORTS.sample
        const order = [...(group.data?.sessions ?? [])].sort((a, b) => (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : a.sample_index - b.sample_index))
        return down ? order.reverse() : order
    }, [group.data, sort])
    const toggle = (id: string) => pick((old) => (old.includes(id) ? old.filter((each) => each !== id) : [...old, id].slice(-2)))
    const compare = () => picked.length === 2 && go(link(["compare", ...picked]))
    useKeys({
        j: () => setActive(Math.min(sessions.length - 1, active + 1)), k: () => setActive(Math.max(0, active - 1)),
        Enter: () => sessions[active] && go(link(["sessions", sessions[active].id])), x: () => sessions[active] && toggle(sessions[active].id),
        c: compare, u: () => go("#/groups"),
    })
    if (!group.data) return (
        <main id="main" tabIndex={-1}><h1 class="hidden">Group</h1>{group.error ? <Failed error={group.error} what={`Group ${id}`} /> : <Loading what="the group" />}</main>
    )
    const it = group.data
    const rewards = it.sessions.flatMap((session) => (session.result?.verdict ? [session.result.verdict.reward] : []))
    const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null
    const spread = rewards.length ? Math.sqrt(rewards.reduce((sum, each) => sum + (each - mean!) ** 2, 0) / rewards.length) : null
    const most = Math.max(...it.sessions.map(total), 0.001)
    const mostTokens = Math.max(1, ...it.sessions.map((session) => session.result?.tokens?.sampled ?? 0))
    const done = it.sessions.filter((session) => session.state === "done").length
    const errors = it.sessions.filter((session) => session.result?.error).length
    const reasons = new Map<string, number>()
    for (const session of it.sessions) {
        const name = session.result?.stop_reason ?? session.state
        reasons.set(name, (reasons.get(name) ?? 0) + 1)
    }
    const head = (name: string, text: string, cls?: string) => (
        <th class={cls} aria-sort={by === name ? (down ? "descending" : "ascending") : undefined}>
            <button type="button" class="sort" onClick={() => setQuery(place, { sort: by === name && !down ? `-${name}` : name })}>{text}{by === name ? (down ? " ↓" : " ↑") : ""}</button>
        </th>
    )
    return (
        <main id="main" tabIndex={-1}>
            <header class="title">
                <div>
                    <p class="crumbs"><a href="#/groups">Groups</a></p>
                    <h1>{it.id} <Badge name={it.cancelled ? "cancelled" : it.state} /></h1>
                    <Labels labels={it.labels} most={8} />
                </div>
                <div class="actions">
                    <button type="button" class="button" disabled={picked.length !== 2} onClick={compare} title="Choose two sessions of the table (c)">Compare {picked.length}/2</button>
                    {it.state === "active" && !it.cancelled && <Confirm question="End all unfinished sessions?" act={() => cancel(path("groups", id)).then(group.again)}>cancel</Confirm>}
                    {it.state === "done" && <Confirm harmless question="Submit the same task again, as new sessions?" act={() => again(id)}>submit again</Confirm>}
                </div>
            </header>
            <dl class="tiles">
                <div><dt>Sessions</dt><dd><Progress done={done} of={it.n} bad={errors} /></dd></div>
                <div><dt>Mean reward</dt><dd><Reward value={mean} /></dd></div>
                <div><dt>Spread</dt><dd>{number(spread)} {rewards.length > 1 && new Set(rewards).size === 1 && <small>all alike: nothing to learn</small>}</dd></div>
                <div><dt>Took</dt><dd>{seconds((it.finished ?? Date.now() / 1000) - it.created)} <small title={clock(it.created)}>{ago(it.created)}</small></dd></div>
                <div class="wide"><dt>Ended by</dt><dd class="badges">{[...reasons].map(([name, n]) => <span key={name}><Badge name={name} /> {n}</span>)}</dd></div>
                {it.submitted_by && <div><dt>Submitted by</dt><dd>{line(it.submitted_by, 40)}</dd></div>}
            </dl>
            <Panel title="Sessions" flush aside={<span class="stagelegend" aria-hidden="true">{["queued", "init", "run", "eval", "stop"].map((name) => <span key={name}><i class={`stage-${name}`} />{name}</span>)}</span>}>
                <Scroll label="Sessions of the group">
                    <table class="plain sessions">
                        <thead><tr><th><span class="hidden">Compare</span></th>{head("sample", "#", "num")}<th>Session</th>{head("state", "Ended by")}{head("reward", "Reward")}{head("turns", "Turns", "num")}{head("tokens", "Tokens", "num")}{head("seconds", "Time", "num")}<th class="time"><span class="hidden">Stages</span></th><th>What</th></tr></thead>
                        <tbody>
                            {sessions.map((session, at) => (
                                <tr key={session.id} class={classes(at === active && "active", picked.includes(session.id) && "picked")}>
                                    <td><input type="checkbox" checked={picked.includes(session.id)} aria-label={`Compare sample ${session.sample_index}`} onChange={() => toggle(session.id)} /></td>
                                    <td class="num dim">{session.sample_index}</td>
                                    <td class="id"><a href={link(["sessions", session.id])}>{session.id}</a></td>
                                    <td><StateBadge session={session} />{session.attempt > 1 && <small class="dim"> attempt {session.attempt}</small>}</td>
                                    <td><Reward value={session.result?.verdict?.reward} /></td>
                                    <td class="num">{count(session.result?.turns)}</td>
                                    <td class="num tokenbar"><i style={{ width: `${((session.result?.tokens?.sampled ?? 0) / mostTokens) * 100}%` }} /><b>{count(session.result?.tokens?.sampled)}</b></td>
                                    <td class="num">{session.result ? seconds(total(session)) : <span class="dim">{seconds(Date.now() / 1000 - session.created)}</span>}</td>
                                    <td class="time">{session.result?.seconds && <StageBar seconds={session.result.seconds} most={most} />}</td>
                                    <td class="what"><What session={session} most={90} /></td>
                                </tr>
                            ))}
                        </tbody>
                    </table>
                </Scroll>
            </Panel>
            {done > 0 && <Findings params={{ group: id }} what="this group" />}
        </main>
    )
}
