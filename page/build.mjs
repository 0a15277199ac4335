// Builds the bundle of the page: page/src -> src/outrider/page. With --check, the bundle is built in memory and compared
// with the files of src/outrider/page; the exit code is 1 if a file differs.
import { createHash } from "node:crypto"
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs"
import { dirname, join } from "node:path"
import { fileURLToPath } from "node:url"
import { gzipSync } from "node:zlib"
import { build } from "esbuild"

const here = dirname(fileURLToPath(import.meta.url))
const target = join(here, "..", "src", "outrider", "page")

// The same digest as in tests/api/test_page.py: SHA-256 over the names and the bytes of the sources, in order.
function digestOfSources() {
    const files = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
    for (const name of readdirSync(join(here, "src")).sort()) files.push(`src/${name}`)
    const digest = createHash("sha256")
    for (const name of files.sort()) {
        const data = readFileSync(join(here, name))
        digest.update(`${name} ${data.length}\n`).update(data)
    }
    return digest.digest("hex")
}

async function bundle(entry, loader = {}) {
    const built = await build({
        entryPoints: [join(here, "src", entry)],
        bundle: true,
        minify: true,
        write: false,
        format: "iife",
        target: ["es2022"],
        charset: "utf8",
        legalComments: "none",
        jsx: "automatic",
        jsxImportSource: "preact",
        define: { "process.env.NODE_ENV": '"production"' },
        loader,
        logLevel: "warning",
    })
    return Buffer.from(built.outputFiles[0].contents)
}

const packages = ["preact", "uplot"]
const licences = packages.map((name) => {
    const folder = join(here, "node_modules", name)
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"))
    return `${name} ${version} (${license})\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}\n`
})
const heading = "The page is part of Outrider (Apache-2.0). Its bundle contains the following packages.\n"
const files = {
    "index.html": readFileSync(join(here, "src", "index.html")),
    "icon.svg": readFileSync(join(here, "src", "icon.svg")),
    "page.js": await bundle("main.tsx"),
    "page.css": await bundle("style.css"),
    "LICENCES.txt": Buffer.from([heading, ...licences].join(`\n${"-".repeat(80)}\n\n`)),
}
files["SOURCES.sha256"] = Buffer.from(`${digestOfSources()}\n`)

if (process.argv.includes("--check")) {
    const different = Object.entries(files).filter(([name, data]) => !readFileSync(join(target, name)).equals(data))
    for (const [name] of different) console.error(`src/outrider/page/${name} is not what \`make page\` builds`)
    process.exit(different.length ? 1 : 0)
}
mkdirSync(target, { recursive: true })
for (const [name, data] of Object.entries(files)) {
    writeFileSync(join(target, name), data)
    console.log(`${name}: ${data.length} bytes, ${gzipSync(data, { level: 9 }).length} compressed`)
}
