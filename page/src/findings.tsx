// The service's findings about faults of groups. A button requests them, because the service reads many sessions for
// them.

import { useState } from "preact/hooks"
import { ApiError, get, withQuery, type Params } from "./api"
import { link } from "./hooks"
import { plural, visible } from "./text"
import { Badge, Failed, Panel } from "./ui"

interface Finding {
    rule: string
    severity: string
    text: string
    subject: string
    sessions: string[]
    next: string
}
interface Diagnosis {
    groups: number
    sessions: number
    truncated: boolean
    findings: Finding[]
}
const TONES: Record<string, string> = { high: "bad", error: "bad", medium: "warn", warning: "warn" }

export function Findings({ params, what }: { params: Params; what: string }) {
    const [found, set] = useState<Diagnosis | null>(null)
    const [error, setError] = useState<ApiError | null>(null)
    const [busy, setBusy] = useState(false)
    const look = () => {
        setBusy(true)
        get<Diagnosis>(withQuery("/v1/diagnosis", params)).then(
            (reply) => { set(reply); setError(null); setBusy(false) },
            (fault: ApiError) => { setError(fault); setBusy(false) },
        )
    }
    return (
        <Panel title="The doctor of runs" flush={found !== null && found.findings.length > 0} aside={
            <>
                {found && <span class="dim">{plural(found.findings.length, "finding")} in {plural(found.sessions, "session")} of {plural(found.groups, "group")}{found.truncated ? ", the newest" : ""}</span>}
                <button type="button" class="button" disabled={busy} onClick={look}>{busy ? "Reading the sessions …" : found ? "Look again" : "Look for faults"}</button>
            </>
        }>
            {error && <Failed error={error} what="Findings" />}
            {!found && !error && <p class="note">Looks for faults in {what}: rewards without spread, tools that never work, truncations, drift, stalls, and more.</p>}
            {found && !found.findings.length && <p class="note">No rule finds a fault.</p>}
            {found && found.findings.length > 0 && (
                <ul class="findings">
                    {found.findings.map((each) => (
                        <li key={each.rule + each.subject}>
                            <p><Badge name={each.severity} tone={TONES[each.severity] ?? "info"} /> <b>{visible(each.text)}</b></p>
                            <p class="dim">{visible(each.next)}</p>
                            {each.sessions.length > 0 && <p class="examples">{each.sessions.map((id) => <a class="id" key={id} href={link(["sessions", id])}>{id}</a>)}</p>}
                        </li>
                    ))}
                </ul>
            )}
        </Panel>
    )
}
