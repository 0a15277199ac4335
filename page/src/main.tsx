import { render } from "preact"
import { useEffect, useRef, useState } from "preact/hooks"
import { get, hasToken, onEvents, onLive, onTokenNeeded, recorded, restartEvents, setToken } from "./api"
import { Compare } from "./compare"
import { Group } from "./group"
import { go, link, useKeys, usePlace } from "./hooks"
import { Groups, Sessions } from "./lists"
import { Overview } from "./overview"
import { Session } from "./session"
import { visible } from "./text"
import { Tip } from "./ui"

type Theme = "auto" | "light" | "dark"
const THEME = "outrider.theme"
function useTheme(): [Theme, string, () => void] {
    const stored = () => {
        try {
            return (localStorage.getItem(THEME) as Theme | null) ?? "auto"
        } catch {
            return "auto"
        }
    }
    const [theme, set] = useState<Theme>(stored)
    const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches)
    useEffect(() => {
        const query = matchMedia("(prefers-color-scheme: dark)")
        const changed = () => setDark(query.matches)
        query.addEventListener("change", changed)
        return () => query.removeEventListener("change", changed)
    }, [])
    const real = theme === "auto" ? (dark ? "dark" : "light") : theme
    document.documentElement.dataset.theme = real
    const next = () => {
        const to = real === "dark" ? "light" : "dark"
        set(to)
        try {
            localStorage.setItem(THEME, to)
        } catch {
            // the choice holds until the page is closed
        }
    }
    return [theme, real, next]
}

const KEYS: [string, string][] = [
    ["/", "search: an id, a label (name=value), or text of errors, ends of outputs, and answers"], ["j  k", "next, previous row or turn"], ["Enter", "open the row"], ["u", "up: from a session to its group"],
    ["x  c", "in a group: choose a row, compare two"], ["t", "in a session: messages or tokens"], ["f", "in a list: the first filter"], ["+  −  0", "zoom of a timeline that has the focus"],
    ["1  2  3", "overview, groups, sessions"], ["d", "dark or light"], ["Esc", "close, or leave a field"], ["?", "this help"],
]

function useDialog(open: boolean) {
    const box = useRef<HTMLDialogElement>(null)
    useEffect(() => {
        if (open && !box.current?.open) box.current?.showModal()
        if (!open && box.current?.open) box.current.close()
    }, [open])
    return box
}

function Help({ open, close }: { open: boolean; close: () => void }) {
    const box = useDialog(open)
    return (
        <dialog ref={box} onClose={close} aria-labelledby="help-title">
            <h2 id="help-title">Keys</h2>
            <dl class="keys">{KEYS.map(([key, what]) => <div key={key}><dt>{key.split("  ").map((each) => <kbd key={each}>{each}</kbd>)}</dt><dd>{what}</dd></div>)}</dl>
            <button type="button" class="button" onClick={close}>Close</button>
        </dialog>
    )
}

function AskToken({ why, given }: { why: string | null; given: () => void }) {
    const box = useDialog(why !== null)
    const [fault, setFault] = useState("")
    const field = useRef<HTMLInputElement>(null)
    const submit = async (event: Event) => {
        event.preventDefault()
        const reply = field.current!.value.trim()
        if (!reply) return
        try {
            new Headers({ Authorization: reply })
        } catch {
            return setFault("A token has no such characters: copy it as it was printed.")
        }
        setToken(reply)
        try {
            await get("/v1/sessions?limit=1")
        } catch (error) {
            const status = (error as { status?: number }).status
            if (status === 401) {
                setToken("")
                setFault("The service does not accept this token.")
                return
            }
        }
        setFault("")
        field.current!.value = ""
        given()
    }
    return (
        <dialog ref={box} class="ask" aria-labelledby="ask-title" onCancel={(event) => event.preventDefault()}>
            <form onSubmit={submit}>
                <h2 id="ask-title">This service needs a token</h2>
                <p class="dim">{visible(why ?? "")}</p>
                <label for="token">Token</label>
                <input id="token" ref={field} type="password" autocomplete="off" spellcheck={false} autofocus />
                {fault && <p class="fault" role="alert">{fault}</p>}
                <p class="dim small">The token stays in this tab until the tab is closed. An operator makes one: <code>outrider token create --role read --name NAME</code></p>
                <button type="submit" class="button solid">Continue</button>
            </form>
        </dialog>
    )
}

function App() {
    const place = usePlace()
    const [, theme, nextTheme] = useTheme()
    const [help, setHelp] = useState(false)
    const [live, setLive] = useState<boolean | null>(false)
    const [why, setWhy] = useState<string | null>(null)
    const [round, setRound] = useState(0)
    const search = useRef<HTMLInputElement>(null)
    useEffect(() => onLive(setLive), [])
    useEffect(() => onEvents(() => {}), [])
    useEffect(() => onTokenNeeded((reason) => setWhy((old) => old ?? reason)), [])
    useKeys({
        "/": () => search.current?.focus(), "?": () => setHelp(true), d: nextTheme,
        "1": () => go("#/"), "2": () => go("#/groups"), "3": () => go("#/sessions"),
        Escape: () => (document.activeElement as HTMLElement | null)?.blur(),
    })
    const [view, one, two] = place.parts
    useEffect(() => {
        document.title = [one ?? view ?? "Overview", "Outrider"].filter(Boolean).map(visible).join(" · ")
        window.scrollTo(0, 0)
        document.getElementById("main")?.focus({ preventScroll: true })
    }, [view, one, two])
    const find = (event: Event) => {
        event.preventDefault()
        const asked = search.current!.value.trim()
        if (!asked) return
        if (/^s-[\w-]+$/.test(asked)) go(link(["sessions", asked]))
        else if (/^g-[\w-]+$/.test(asked)) go(link(["groups", asked]))
        else if (/^[\w.-]+=/.test(asked)) go(link(["groups"], { label: asked }))
        else go(link(["sessions"], { text: asked }))
        search.current!.value = ""
        search.current!.blur()
    }
    const tab = (name: string, text: string, here: boolean) => <a href={`#/${name}`} aria-current={here ? "page" : undefined}>{text}</a>
    let body
    if (view === "groups" && one) body = <Group key={one} id={one} place={place} />
    else if (view === "groups") body = <Groups place={place} />
    else if (view === "sessions" && one) body = <Session key={one} id={one} place={place} />
    else if (view === "sessions") body = <Sessions place={place} />
    else if (view === "compare" && one && two) body = <Compare key={`${one} ${two}`} ids={[one, two]} place={place} />
    else if (view === undefined) body = <Overview place={place} theme={theme} />
    else body = <main id="main" tabIndex={-1}><h1>Nothing is here</h1><p class="note">There is no such view. <a href="#/">Overview</a></p></main>
    return (
        <>
            <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus() }}>Skip to the content</a>
            <header class="top">
                <a class="brand" href="#/" aria-label="Outrider, overview">
                    <svg viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="8" /><path d="M8 23 16 8l8 15-8-5z" /></svg><span>outrider</span>
                </a>
                {recorded ? <span class="file dim">a file made {visible(recorded.made)}</span> : (
                    <>
                        <nav aria-label="Views">{tab("", "Overview", view === undefined)}{tab("groups", "Groups", view === "groups" || view === "compare")}{tab("sessions", "Sessions", view === "sessions")}</nav>
                        <form role="search" aria-label="Search" onSubmit={find}>
                            <input ref={search} type="search" placeholder="Search" aria-label="Search by id, label or text" autocomplete="off" spellcheck={false} /><kbd aria-hidden="true">/</kbd>
                        </form>
                        {live === null ? <span class="connection">a finished run</span> : <span class={`connection ${live ? "on" : "off"}`} title={live ? "Changes are shown as they happen" : "No stream of changes"}><i />{live ? "live" : "offline"}</span>}
                    </>
                )}
                <button type="button" class="icon" aria-label={theme === "dark" ? "Light colours" : "Dark colours"} title="Dark or light (d)" onClick={nextTheme}>{theme === "dark" ? "☀" : "☾"}</button>
                <button type="button" class="icon" aria-label="Keys" title="Keys (?)" onClick={() => setHelp(true)}>?</button>
                {hasToken() && <button type="button" class="quiet" onClick={() => { setToken(""); location.reload() }}>forget token</button>}
            </header>
            <div key={round} class="view">{body}</div>
            <Help open={help} close={() => setHelp(false)} />
            <AskToken why={why} given={() => { setWhy(null); setRound(round + 1); restartEvents() }} />
            <Tip />
        </>
    )
}

if (recorded && !location.hash) {
    const only = Object.keys(recorded.replies).find((each) => /^\/v1\/sessions\/[^/]+$/.test(each))
    if (only) location.hash = `#/sessions/${only.split("/").pop()}`
}
render(<App />, document.getElementById("page")!)
