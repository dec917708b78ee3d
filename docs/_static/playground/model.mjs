/** The bundled model in a browser: the layer loop of `idp_tutorial.core.loop`, over exported graphs. */

const INPUT = "input" // the place of IDPG's prompt: among the word vectors, after `<s>`

/** Return vectors `[1,n,d]` inserted into `x` `[1,T,d]` before a position. */
function insert(x, vectors, d, position) {
  const joined = new Float32Array(x.length + vectors.length)
  joined.set(x.subarray(0, position * d))
  joined.set(vectors, position * d)
  joined.set(x.subarray(position * d), position * d + vectors.length)
  return joined
}

/** Return the mean of the vectors of `x` `[1,T,d]`. */
function meanVector(x, d) {
  const mean = new Float32Array(d)
  for (let i = 0; i < x.length; i++) mean[i % d] += x[i]
  return mean.map(v => (v * d) / x.length)
}

/**
 * Return a text as the tokenizer of the package normalises it: NFKC, then lower case, letter by
 * letter. In a whole text, JavaScript writes a sigma at the end of a word as a final one.
 */
export function normalise(text) {
  return [...text.normalize("NFKC")].map(letter => letter.toLowerCase()).join("")
}

export class Model {
  /**
   * `ort`: the module onnxruntime-web; `Tokenizer`: the class of @huggingface/tokenizers;
   * `read`: function that returns a file of the manifest as an ArrayBuffer.
   */
  constructor(ort, Tokenizer, manifest, read) {
    Object.assign(this, {ort, Tokenizer, manifest, read, d: manifest.d})
    this.sessions = new Map()
    this.prompts = new Map() // the prompts of the last texts, as promises
  }

  async readJson(name) {
    return JSON.parse(new TextDecoder().decode(await this.read(name)))
  }

  /** Load tokenizer and backbone; `onFile` is called with the name of each loaded file. */
  async load() {
    const files = await Promise.all(["tokenizer.json", "tokenizer_config.json"].map(f => this.readJson(f)))
    this.tokenizer = new this.Tokenizer(...files)
    const heads = Object.values(this.manifest.tasks).map(task => task.head)
    for (const name of [...this.manifest.backbone, ...heads]) await this.session(name)
  }

  session(name) {
    if (!this.sessions.has(name)) {
      const start = async () => this.ort.InferenceSession.create(await this.read(`${name}.onnx`))
      this.sessions.set(name, start().catch(error => { this.sessions.delete(name); throw error }))
    }
    return this.sessions.get(name)
  }

  /** Run a graph with one input; return its outputs by name, as typed arrays. */
  async run(name, data, dims, type = "float32") {
    const session = await this.session(name)
    const outputs = await session.run({x: new this.ort.Tensor(type, data, dims)})
    return Object.fromEntries(Object.entries(outputs).map(([key, tensor]) => [key, tensor.data]))
  }

  async runVectors(name, x) {
    return (await this.run(name, x, [1, x.length / this.d, this.d])).out
  }

  /** Return token ids of a text in the template of a task, and the position of the mask. */
  encode(task, text) {
    const {pieces, max_tokens} = this.manifest.tasks[task]
    const fixed = pieces.reduce((n, piece) => n + (piece.ids?.length ?? 0), 0)
    const ids = []
    let mask = -1
    let cut = false
    for (const piece of pieces) {
      if (piece.mask) mask = ids.length
      if (piece.ids) { ids.push(...piece.ids); continue }
      const own = this.tokenizer.encode(piece.space + normalise(text), {add_special_tokens: false}).ids
      cut = own.length > max_tokens - fixed
      ids.push(...own.slice(0, max_tokens - fixed))
    }
    return {ids, mask, cut}
  }

  /** Return the tokens of ids as a reader sees them. */
  tokens(ids) {
    return ids.map(id => this.tokenizer.decode([id], {clean_up_tokenization_spaces: false}) || "·")
  }

  async words(ids) {
    return (await this.run("words", BigInt64Array.from(ids, BigInt), [1, ids.length], "int64")).out
  }

  /**
   * Run all layers and return the final states, `at`: the state at `<s>` before layer `layer`.
   * A prompt enters before layer `layer`; with "input", among the words.
   */
  async pass(words, prompt = null, layer = null) {
    let x = words
    const first = this.manifest.backbone.indexOf("layer-0")
    if (prompt && layer === INPUT) x = insert(x, prompt, this.d, 1)
    x = await this.runVectors("embed", x)
    let at = null
    for (let i = 0; i < this.manifest.n_layers; i++) {
      if (i === layer) {
        at = x.slice(0, this.d)
        if (prompt) x = insert(x, prompt, this.d, 0)
      }
      x = await this.runVectors(this.manifest.backbone[first + i], x)
    }
    return {states: x, at}
  }

  /** Return the prompt that a trained model makes for a text: `[t·d]`, and weights of its tokens. */
  prompt(entry, ids) {
    if (entry.prompt) return {prompt: Float32Array.from(entry.prompt)}
    const key = `${entry.file} ${ids}`
    if (!this.prompts.has(key)) {
      if (this.prompts.size > 100) this.prompts.clear()
      const made = this.generate(entry, ids)
      made.catch(() => this.prompts.delete(key))
      this.prompts.set(key, made)
    }
    return this.prompts.get(key)
  }

  async generate(entry, ids) {
    const words = await this.words(ids)
    if (entry.reads === "words") return this.run(entry.file, words, [1, ids.length, this.d])
    const {states, at} = await this.pass(words, null, entry.layer)
    const x = entry.reads === "state" ? at : meanVector(states, this.d)
    return this.run(entry.file, x, [1, this.d])
  }

  /** Return the logits of the classes for a text with a prompt, or without one. */
  async logits(task, {ids, mask}, prompt = null, layer = null) {
    const place = layer ?? INPUT
    const {states} = await this.pass(await this.words(ids), prompt, place)
    const t = prompt ? prompt.length / this.d : 0
    const position = mask + t
    const state = states.slice(position * this.d, (position + 1) * this.d)
    return [...(await this.run(this.manifest.tasks[task].head, state, [1, this.d])).out]
  }

  /** Return the weights of the tokens in ID-SPAM, after training and before. */
  async tokenWeights(entry, ids) {
    const words = await this.words(ids)
    const dims = [1, ids.length, this.d]
    const [after, before] = [await this.run(entry.file, words, dims), await this.run(entry.untrained, words, dims)]
    return {after: [...after.weights], before: [...before.out]}
  }
}

export function softmax(logits) {
  const top = Math.max(...logits)
  const powers = logits.map(x => Math.exp(x - top))
  const sum = powers.reduce((a, b) => a + b, 0)
  return powers.map(x => x / sum)
}
