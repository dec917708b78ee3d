/** The panels of the page *Playground*. Stored answers first; the model when the reader asks for it. */

import {COUNTS} from "./counts.mjs"
import {Model, softmax} from "./model.mjs"

const MAX_CHARACTERS = 2000
const FOLDER = "playground/" // exported models and runtime
const root = document.getElementById("pg-root")
const $ = id => document.getElementById(id)
const data = JSON.parse($("pg-data").textContent)
let model = null

// ---- small helpers

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value
    else node.setAttribute(name, value)
  }
  node.append(...children)
  return node
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  node.append(...children)
  return node
}

const chosen = name => root.querySelector(`input[name="${name}"]:checked`).value
const largest = values => values.indexOf(Math.max(...values))
const mean = values => values.reduce((a, b) => a + b, 0) / values.length
const percent = x => `${(100 * x).toFixed(0)} %`
const megabytes = bytes => `${(bytes / 1e6).toFixed(1)} MB`
const placeOf = layer => layer ?? "input"
const placeName = place => (place === "input" ? "among the words" : `before layer ${place} of 8`)
const READERS = {"lpt-npg": "NPG (reads the layers below)", "id-spam": "ID-SPAM (reads the words)", "s-idpg-phm": "IDPG (reads the text first)"}

/** Return a function that runs the latest call only, and never two at once. */
function latest(run) {
  let next = null
  let running = false
  return async () => {
    next = run
    if (running) return
    running = true
    while (next) {
      const now = next
      next = null
      try { await now() } catch (error) { say(`Something failed: ${error.message}`); console.warn(error) }
    }
    running = false
  }
}

function say(text) { $("pg-status").textContent = text }

// ---- answers: stored ones, or from the model

const taskNow = () => chosen("pg-task")
const sentencesOf = task => data.stored.sentences[task]

function storedAnswer(task, method, place) {
  return data.stored.answers.find(
    a => a.task === task && a.method === method && placeOf(a.layer) === place)
}

function entryOf(task, method, place) {
  return model.manifest.prompts.find(
    p => p.task === task && p.method === method && placeOf(p.layer) === place)
}

const readText = id => $(id).value.trim().slice(0, MAX_CHARACTERS)

/** Return logits for a text with the prompt of another (`giver`), or null if they are not stored. */
async function answer(task, text, method, place, giver) {
  if (model) {
    const encoded = model.encode(task, text)
    if (!method) return model.logits(task, encoded)
    const entry = entryOf(task, method, place)
    const made = await model.prompt(entry, model.encode(task, giver).ids)
    return model.logits(task, encoded, made.prompt, entry.layer)
  }
  const index = sentencesOf(task).indexOf(text)
  const from = sentencesOf(task).indexOf(giver)
  if (!method) return data.stored.answers.find(a => a.task === task).without[index] ?? null
  const stored = storedAnswer(task, method, place)
  const row = method === "lpt" ? 0 : from
  return stored?.logits[row]?.[index] ?? null
}

// ---- panel: whose prompt?

function fillMethods() {
  const trained = new Set(data.scores.filter(s => s.task === taskNow()).map(s => s.method))
  const methods = Object.keys(data.methods).filter(m => trained.has(m))
  const select = $("pg-method")
  const before = select.value
  select.replaceChildren(...methods.filter(m => m !== "lpt")
    .map(m => element("option", {value: m, textContent: READERS[m]})))
  if (methods.includes(before)) select.value = before
}

function methodNow() {
  const owner = chosen("pg-owner")
  if (owner === "none") return null
  return owner === "static" ? "lpt" : $("pg-method").value
}

function fillLayers() {
  const method = methodNow() ?? $("pg-method").value
  const places = data.scores.filter(s => s.task === taskNow() && s.method === method)
    .map(s => placeOf(s.layer)).sort((a, b) => a - b)
  const select = $("pg-layer")
  const before = select.value
  select.replaceChildren(...places.map(p => element("option", {value: p, textContent: placeName(p)})))
  const wanted = places.map(String).includes(before) ? before : String(places.at(-1))
  select.value = wanted
}

function placeNow() {
  const value = $("pg-layer").value
  return value === "input" ? "input" : Number(value)
}

function enableControls() {
  const owner = chosen("pg-owner")
  $("pg-method").disabled = owner === "static" || owner === "none"
  $("pg-layer").disabled = owner === "none"
  $("pg-giver").disabled = owner !== "other"
}

function fillSentences() {
  const sentences = sentencesOf(taskNow())
  $("pg-sentences").replaceChildren(...sentences.map(s => element("option", {value: s})))
  $("pg-text").value = sentences[0]
  $("pg-giver").value = sentences[1]
}

function drawBars(labels, shares) {
  const top = largest(shares)
  $("pg-bars").replaceChildren(...shares.map((share, i) =>
    element("div", {className: i === top ? "pg-bar pg-top" : "pg-bar"},
      element("span", {className: "pg-label", textContent: labels[i]}),
      element("span", {className: "pg-track"}, element("span", {className: "pg-fill", style: `width:${100 * share}%`})),
      element("span", {className: "pg-number", textContent: percent(share)}))))
}

function clearResult(text) {
  $("pg-verdict").textContent = text
  $("pg-bars").replaceChildren()
  $("pg-follows").textContent = ""
  $("pg-origin").textContent = ""
}

function missingText() {
  if (!data.live) return "There is no live model here: pick one of the listed sentences."
  return "To ask about your own sentence, load the model (the button in the first panel); the listed ones have stored answers."
}

async function describeReader(owner, task, text, giver, label, method, place) {
  const labels = data.labels[task]
  if (owner === "none") return "Without a prompt the frozen model only guesses: it has not been trained for this task."
  if (owner === "static") return "Every sentence gets the same five vectors, so the frozen layers above them have to read the text themselves."
  if (owner === "own") return "A small network has read this sentence and written its prompt."
  const ofText = labels[largest(await answer(task, text, method, place, text))]
  const ofGiver = labels[largest(await answer(task, giver, method, place, giver))]
  const own = `With its own prompt, the first sentence gets “${ofText}”, the second “${ofGiver}”.`
  if (ofText === ofGiver) return `${own} Both agree, so this pair decides nothing: pick a sentence with another answer.`
  if (label === ofGiver) return `${own} The prediction follows the prompt, not the text.`
  if (label === ofText) return `${own} The prediction follows the text, not the prompt.`
  return `${own} The prediction follows neither.`
}

function describeScore(task, method, place) {
  const score = data.scores.find(s => s.task === task && s.method === method && placeOf(s.layer) === place)
  if (!score) return ""
  const name = method === "lpt" ? "The static prompt" : data.methods[method]
  return ` ${name} ${placeName(place)} scores ${score.score.toFixed(1)} % on the test sentences (one seed, ${score.steps} steps).`
}

async function showAnswer() {
  const [task, owner, method, place] = [taskNow(), chosen("pg-owner"), methodNow(), placeNow()]
  const text = readText("pg-text")
  const giver = owner === "other" ? readText("pg-giver") : text
  if (!text || !giver) return clearResult("Type a sentence.")
  const start = performance.now()
  const logits = await answer(task, text, method, place, giver)
  const ms = performance.now() - start
  if (!logits) return clearResult(missingText())
  const labels = data.labels[task]
  const label = labels[largest(logits)]
  $("pg-verdict").textContent = `The model answers: ${label}`
  $("pg-verdict").dataset.label = label
  $("pg-verdict").dataset.logits = JSON.stringify(logits)
  drawBars(labels, softmax(logits))
  $("pg-follows").textContent = await describeReader(owner, task, text, giver, label, method, place)
  const cut = model?.encode(task, text).cut || model?.encode(task, giver).cut
  const origin = model ? `Computed in this browser in ${ms.toFixed(0)} ms.` : "Stored answer."
  const long = cut ? " A sentence is longer than the model reads here; its end was left out." : ""
  $("pg-origin").textContent = origin + long + describeScore(task, method, place)
  markCell(text, owner, giver)
}

async function showMatrix() {
  const [task, place] = [taskNow(), placeNow()]
  const method = methodNow() ?? "lpt"
  const sentences = sentencesOf(task)
  const labels = data.labels[task]
  const owner = chosen("pg-owner")
  const givers = owner === "none" ? [null] : method === "lpt" ? [sentences[0]] : sentences
  const rows = []
  for (const giver of givers) {
    const cells = []
    for (const text of sentences) {
      const logits = await answer(task, text, owner === "none" ? null : method, place, giver)
      const i = largest(logits)
      const button = element("button", {type: "button", textContent: labels[i], onclick: () => showCell(text, giver)})
      cells.push(element("td", {className: `pg-class-${i % 2}`, "data-text": text, "data-giver": giver ?? ""}, button))
    }
    const name = giver === null ? "no prompt" : method === "lpt" ? "one prompt for all" : `“${giver}”`
    rows.push(element("tr", {}, element("th", {scope: "row", textContent: name}), ...cells))
  }
  const head = element("tr", {}, element("th", {scope: "col", textContent: "prompt of ↓, model reads →"}),
    ...sentences.map(s => element("th", {scope: "col", textContent: s})))
  $("pg-matrix").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows))
  $("pg-matrix").dataset.state = `${task} ${method} ${place} ${owner} ${model ? "live" : "stored"}`
}

/** Show a cell of the table in the fields above. */
function showCell(text, giver) {
  $("pg-text").value = text
  if (["own", "other"].includes(chosen("pg-owner"))) {
    root.querySelector('input[name="pg-owner"][value="other"]').checked = true
    $("pg-giver").value = giver
    enableControls()
    $("pg-matrix").dataset.state = $("pg-matrix").dataset.state.replace(" own ", " other ")
  }
  refreshAnswer()
}

function markCell(text, owner, giver) {
  const sentences = sentencesOf(taskNow())
  const from = owner === "none" ? "" : owner === "static" ? sentences[0] : giver
  for (const cell of $("pg-matrix").querySelectorAll("td")) {
    const isNow = cell.getAttribute("data-text") === text && cell.getAttribute("data-giver") === from
    cell.classList.toggle("pg-now", isNow)
    cell.firstChild.setAttribute("aria-pressed", isNow)
  }
}

const refreshAnswer = latest(showAnswer)
const refreshAll = latest(async () => { await showMatrix(); await showAnswer() })

// ---- panel: which words?

const WORDS_TASK = "questions" // one word of a question often says what it asks for

function fillWordsSentences() {
  const sentences = sentencesOf(WORDS_TASK)
  $("pg-words-sentences").replaceChildren(...sentences.map(s => element("option", {value: s})))
  $("pg-words-text").value = sentences.at(-1)
  $("pg-questions").append(...sentences.map(s => element("button", {type: "button", textContent: s,
    onclick: () => { $("pg-words-text").value = s; refreshWeights() }})))
}

async function tokenWeights(task, text) {
  const places = data.scores.filter(s => s.task === task && s.method === "id-spam").map(s => placeOf(s.layer))
  const place = Math.max(...places)
  if (model) {
    const {ids} = model.encode(task, text)
    return {tokens: model.tokens(ids), place, ...await model.tokenWeights(entryOf(task, "id-spam", place), ids)}
  }
  const stored = storedAnswer(task, "id-spam", place)
  const i = sentencesOf(task).indexOf(text)
  if (!stored || i < 0) return null
  return {tokens: stored.tokens[i], place, after: stored.after[i], before: stored.before[i]}
}

async function showWeights() {
  const task = WORDS_TASK
  const text = readText("pg-words-text")
  const found = text && await tokenWeights(task, text)
  if (!found) {
    $("pg-weights").replaceChildren()
    $("pg-words-note").textContent = text ? missingText() : "Type a sentence."
    return
  }
  const weights = found[chosen("pg-when")]
  const top = Math.max(...found.after, ...found.before)
  $("pg-weights").replaceChildren(...weights.map((w, i) =>
    element("li", {className: "pg-bar"},
      element("span", {className: "pg-label", textContent: found.tokens[i].trim() || "·"}),
      element("span", {className: "pg-track"}, element("span", {className: "pg-fill", style: `width:${(100 * w) / top}%`})),
      element("span", {className: "pg-number", textContent: `${(100 * w).toFixed(1)} %`}))))
  const words = found.tokens.map(t => t.trim())
  const best = largest(weights)
  $("pg-words-note").textContent = `“${words[best]}” has the largest weight. The model reads the question in a template, “<mask>: …”, whose tokens have weights too.` + describeScore(task, "id-spam", found.place)
}

const refreshWeights = latest(showWeights)

// ---- panel: how deep?

const depthOf = () => data.depth[Number(chosen("pg-model"))]

function measuredLayers(depth) {
  return [...new Set(Object.values(depth.points).flat().map(p => p.layer))].sort((a, b) => a - b)
}

function setUpDepth() {
  const inputs = data.depth.map((depth, i) =>
    element("label", {}, element("input", {type: "radio", name: "pg-model", value: String(i), checked: i === 0}), ` ${depth.name}`))
  $("pg-models").append(...inputs)
  const reset = () => {
    const layers = measuredLayers(depthOf())
    $("pg-depth").max = layers.length - 1
    $("pg-depth").value = layers.length - 1
    showDepth()
  }
  for (const label of inputs) label.addEventListener("change", reset)
  $("pg-depth").addEventListener("input", showDepth)
  reset()
}

const narrow = matchMedia("(max-width: 40rem)") // phones get drawings of fewer units, so larger letters
const CHART = {h: 320, left: 44, right: 14, top: 34, bottom: 42}

function drawDepth(depth, layer) {
  const {h, left, right, top, bottom} = CHART
  const w = narrow.matches ? 380 : 640
  const x = l => left + (l / (depth.n_layers - 1)) * (w - left - right)
  const y = s => h - bottom - (s / 100) * (h - top - bottom)
  const names = {lpt: "static", "lpt-npg": "generated (NPG)"}
  const parts = [svg("rect", {x: x(layer) - 9, y: top, width: 18, height: h - top - bottom, class: "pg-marker"})]
  for (const s of [0, 25, 50, 75, 100]) {
    parts.push(svg("line", {x1: left, x2: w - right, y1: y(s), y2: y(s), class: "pg-grid"}),
      svg("text", {x: left - 6, y: y(s) + 4, "text-anchor": "end"}, String(s)))
  }
  for (const l of measuredLayers(depth)) parts.push(svg("text", {x: x(l), y: h - bottom + 18, "text-anchor": "middle"}, String(l)))
  parts.push(svg("text", {x: 4, y: 14}, "test accuracy, %; a mark is a seed"),
    svg("text", {x: (left + w) / 2, y: h - 6, "text-anchor": "middle"}, `layer that the prompt enters, of ${depth.n_layers}`))
  for (const [method, points] of Object.entries(depth.points)) {
    const line = points.map(p => `${x(p.layer)},${y(mean(p.scores))}`).join(" ")
    parts.push(svg("polyline", {points: line, class: `pg-line pg-${method}`}))
    for (const p of points) {
      for (const s of p.scores) {
        parts.push(method === "lpt"
          ? svg("circle", {cx: x(p.layer), cy: y(s), r: 4, class: `pg-dot pg-${method}`})
          : svg("rect", {x: x(p.layer) - 4, y: y(s) - 4, width: 8, height: 8, class: `pg-dot pg-${method}`}))
      }
    }
  }
  const legend = Object.keys(depth.points).map((method, i) => {
    const at = left + 14 + 80 * i
    return svg("g", {}, method === "lpt"
      ? svg("circle", {cx: at, cy: h - bottom - 16, r: 4, class: `pg-dot pg-${method}`})
      : svg("rect", {x: at - 4, y: h - bottom - 20, width: 8, height: 8, class: `pg-dot pg-${method}`}),
    svg("text", {x: at + 10, y: h - bottom - 12}, names[method]))
  })
  const label = `Accuracy of static and generated prompts of ${depth.name}, by layer; a dot is a seed`
  return svg("svg", {viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": label}, ...parts, ...legend)
}

function showDepth() {
  const depth = depthOf()
  const layer = measuredLayers(depth)[Number($("pg-depth").value)]
  const left = depth.n_layers - layer
  $("pg-depth-out").textContent = `${layer} of ${depth.n_layers}`
  $("pg-depth").setAttribute("aria-valuetext", `layer ${layer} of ${depth.n_layers}`)
  $("pg-depth-chart").replaceChildren(drawDepth(depth, layer))
  const at = method => depth.points[method].find(p => p.layer === layer)
  const [still, made] = [at("lpt"), at("lpt-npg")]
  const of = (name, p) => p && `${name} prompt scores ${mean(p.scores).toFixed(1)} %`
  const scores = [of("the static", still), of("the generated", made)].filter(Boolean).join(", ")
  const cost = (name, p) => p?.ms && `${p.ms} ms and ${p.mb} MB (${name})`
  const costs = [cost("static", still), cost("generated", made)].filter(Boolean).join(", ")
  const times = costs && ` A step of training takes ${costs} on one NVIDIA H200.`
  const layers = left === 1 ? "1 layer is" : `${left} layers are`
  const seeds = (still ?? made).scores.length
  $("pg-depth-text").textContent = `${layers} left above the prompt to read the text: ${scores} (mean of ${seeds} seeds).${times}`
}

// ---- panel: how many parameters?

const WIDTHS = [192, 384, 576, 768, 1024, 1280, 2048]
const SLIDERS = {
  d: {read: i => WIDTHS[i], write: d => WIDTHS.indexOf(d)},
  t: {read: Number, write: Number},
  m: {read: i => 2 ** i, write: m => Math.log2(m)},
  n: {read: i => 2 ** i, write: n => Math.log2(n)},
  l: {read: Number, write: Number},
}

function setSizes(sizes) {
  const values = {...sizes, l: sizes.L ?? 24}
  for (const [name, slider] of Object.entries(SLIDERS)) {
    if (values[name] !== undefined) $(`pg-${name}`).value = slider.write(values[name])
  }
  showCounts()
}

function readSizes() {
  const sizes = {}
  for (const [name, slider] of Object.entries(SLIDERS)) {
    sizes[name === "l" ? "L" : name] = slider.read(Number($(`pg-${name}`).value))
    const value = String(sizes[name === "l" ? "L" : name])
    $(`pg-${name}-out`).textContent = value
    $(`pg-${name}`).setAttribute("aria-valuetext", value)
  }
  return sizes
}

function publishedFor(method, count) {
  return data.published.find(p => p.method === method && p.exact === count)
}

function showCounts() {
  const sizes = readSizes()
  const counts = Object.entries(COUNTS).map(([method, count]) => [method, count(sizes)])
  const top = Math.max(...counts.map(([, n]) => n))
  const rows = counts.map(([method, n]) => {
    const published = publishedFor(method, n)
    const mark = published ? `${published.paper} prints ${published.reported}${published.unit === 1024 ? " (K: 1,024)" : ""}` : ""
    return element("tr", {className: published ? "pg-now" : ""},
      element("th", {scope: "row", textContent: method}),
      element("td", {className: "pg-number", textContent: n.toLocaleString("en-US")}),
      element("td", {}, element("span", {className: "pg-track"}, element("span", {className: "pg-fill", style: `width:${(100 * n) / top}%`}))),
      element("td", {textContent: mark}))
  })
  const head = ["method", "trained parameters", "", "published"].map(h => element("th", {scope: "col", textContent: h}))
  $("pg-counts").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))
  const {d, m, n} = sizes
  const full = d * m
  const phm = n ** 3 + full / n
  $("pg-count-text").textContent = `A matrix of ${d} × ${m} has ${full.toLocaleString("en-US")} numbers. As a sum of ${n} Kronecker product${n > 1 ? "s" : ""} of a block of ${n} × ${n} and one of ${d / n} × ${m / n}, it has ${phm.toLocaleString("en-US")}.`
  $("pg-blocks").replaceChildren(drawBlocks(sizes))
}

/** Return a rectangle with its size written below, and a grid of n × n where there is room. */
function drawBlock(x, w, h, kind, rows, columns, n = 1) {
  const middle = 100
  const top = middle - h / 2
  const lines = []
  for (let i = 1; i < n && Math.min(w, h) / n > 2.5; i++) {
    lines.push(svg("line", {x1: x + (i * w) / n, x2: x + (i * w) / n, y1: top, y2: top + h, class: "pg-grid"}),
      svg("line", {x1: x, x2: x + w, y1: top + (i * h) / n, y2: top + (i * h) / n, class: "pg-grid"}))
  }
  return svg("g", {class: `pg-block pg-${kind}`}, svg("rect", {x, y: top, width: w, height: h}), ...lines,
    svg("rect", {x, y: top, width: w, height: h, fill: "none"}),
    svg("text", {x: x + w / 2, y: top + h + 16, "text-anchor": "middle"}, `${rows} × ${columns}`))
}

/** Draw the matrix as a sum of Kronecker products; the factors are drawn to a larger scale. */
function drawBlocks({d, m, n}) {
  const size = (rows, columns, longest) => [columns, rows].map(k => Math.max((k * longest) / Math.max(rows, columns), 3))
  const label = (rows, columns) => 7.5 * `${rows} × ${columns}`.length // width of the size below a block
  const parts = []
  let x = 8
  const block = (rows, columns, longest, kind, n) => {
    const [w, h] = size(rows, columns, longest)
    const room = Math.max(w, label(rows, columns))
    parts.push(drawBlock(x + (room - w) / 2, w, h, kind, rows, columns, n))
    x += room + 8
  }
  const sign = (text, width) => { parts.push(svg("text", {x, y: 104}, text)); x += width }
  block(d, m, 150, "full", n)
  sign("=", 20)
  const shown = Math.min(n, narrow.matches ? 1 : 2)
  for (let k = 0; k < shown; k++) {
    if (k) sign("+", 18)
    block(n, n, 10 + 3 * n, "rule", n)
    sign("⊗", 20)
    block(d / n, m / n, 70, "factor")
  }
  if (n > shown) sign(narrow.matches ? `+ … (${n})` : `+ … (${n} such terms)`, narrow.matches ? 70 : 130)
  const name = `A matrix of ${d} by ${m} as the sum of ${n} Kronecker products`
  return svg("svg", {viewBox: `0 0 ${Math.max(x + 8, narrow.matches ? 340 : 460)} 200`, role: "img", "aria-label": name}, ...parts)
}

function setUpCounts() {
  $("pg-presets").append(...data.published.map(p => element("button", {
    type: "button", textContent: `${p.method}: ${p.reported}`, onclick: () => setSizes(p.sizes)})))
  for (const name of Object.keys(SLIDERS)) $(`pg-${name}`).addEventListener("input", showCounts)
  setSizes(data.published[0].sizes)
}

// ---- loading the model

async function fetchFile(name) {
  const response = await fetch(FOLDER + name)
  if (!response.ok) throw new Error(`${name} is missing (${response.status})`)
  return response.arrayBuffer()
}

async function loadModel() {
  const button = $("pg-load")
  const progress = $("pg-progress")
  button.disabled = true
  progress.hidden = false
  say("Loading …")
  const manifest = JSON.parse(new TextDecoder().decode(await fetchFile("manifest.json")))
  const scripts = ["ort.wasm.bundle.min.mjs", "tokenizers.min.mjs"]
  let bytes = scripts.reduce((sum, name) => sum + manifest.files[name].bytes, 0)
  const count = name => {
    bytes += manifest.files[name].bytes
    progress.value = Math.min(1, bytes / data.live.bytes)
    say(`${megabytes(bytes)} of ${megabytes(data.live.bytes)}`)
  }
  const read = async name => {
    const file = await fetchFile(name)
    if (!model) count(name)
    return file
  }
  const url = name => new URL(FOLDER + name, document.baseURI).href
  const [ort, {Tokenizer}] = await Promise.all(scripts.map(name => import(url(name))))
  ort.env.wasm.numThreads = 1
  ort.env.wasm.wasmBinary = await read("ort-wasm-simd-threaded.wasm")
  const loaded = new Model(ort, Tokenizer, manifest, read)
  await loaded.load()
  model = loaded
  button.hidden = true
  progress.hidden = true
  say("The model is loaded: type any sentence. Nothing that you type leaves this page.")
  $("pg-load-line").dataset.state = "loaded"
  refreshAll()
  refreshWeights()
}

function setUpLoading() {
  const button = $("pg-load")
  if (!data.live) {
    button.hidden = true
    say(data.notebook
      ? "Stored answers. The playground of the site runs the model on any sentence."
      : "This copy of the site has been built without the live model: the panels show stored answers.")
    return
  }
  button.textContent = `Load the model to type your own (${megabytes(data.live.bytes)})`
  button.addEventListener("click", () => loadModel().catch(error => {
    console.warn(error)
    button.disabled = false
    $("pg-progress").hidden = true
    say(`The model could not be loaded: ${error.message}. Try again.`)
  }))
}

// ---- start

function start() {
  root.hidden = false
  for (const table of document.querySelectorAll(".pg-stored")) table.hidden = true // the first panel has it
  const only = document.body.dataset.panel // a notebook shows one panel
  if (only) for (const panel of root.querySelectorAll(".pg-panel")) panel.hidden = panel.getAttribute("aria-labelledby") !== only
  fillSentences()
  fillWordsSentences()
  fillMethods()
  fillLayers()
  enableControls()
  setUpLoading()
  $("pg-task").addEventListener("change", () => {
    fillSentences(); fillMethods(); fillLayers(); refreshAll()
  })
  for (const id of ["pg-owner", "pg-method", "pg-layer"]) {
    $(id).addEventListener("change", () => {
      if (id !== "pg-layer") fillLayers()
      enableControls()
      refreshAll()
    })
  }
  for (const id of ["pg-text", "pg-giver"]) $(id).addEventListener("input", refreshAnswer)
  $("pg-words-text").addEventListener("input", refreshWeights)
  $("pg-when").addEventListener("change", refreshWeights)
  refreshAll()
  refreshWeights()
  if (data.depth.length) setUpDepth()
  setUpCounts()
  if (location.hash) $(location.hash.slice(1))?.scrollIntoView() // the panels were hidden until now
  narrow.addEventListener("change", () => {
    if (data.depth.length) showDepth()
    showCounts()
  })
}

start()
