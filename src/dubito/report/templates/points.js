// Many circles on a canvas, for the page of a map and for the explorer. WebGL2 draws them out of sight and the canvas shows
// a copy: so it prints like any picture, and draws the same one itself wherever WebGL2 is missing, lost or too limited.
// While the map is moved, the last picture moves along, and only what comes into sight is drawn: also without a graphics
// card, a million points move smoothly.

const FARTHEST = 80;
const FAINT = 0.18;
const LINES = { opacity: 0.95, wide: 3.5, narrow: 1.75 };
const FEW = 2000;
const LEVELS = 65535;
const BANDS = 256;

const vertex = (extra) => `#version 300 es
layout(location = 0) in vec2 place;
layout(location = 1) in float share;
layout(location = 2) in vec4 paint;
uniform bool faint;
uniform vec2 centre, corner, radius, opacity;
uniform vec3 ghost;
uniform float span, faintRadius, line;
flat out vec4 colour;
flat out vec2 sizes;
void main() {
  float r = faint ? faintRadius : mix(radius.x, radius.y, share);
  sizes = vec2(r, 2.0 * r + ${extra} + 1.0);
  colour = faint ? vec4(ghost, ${FAINT}) : vec4(paint.rgb, mix(opacity.x, opacity.y, share));
  gl_PointSize = sizes.y;
  gl_Position = vec4((place - centre) * span / corner, 0, 1);
}`;

const DISC = `#version 300 es
precision highp float;
flat in vec4 colour;
flat in vec2 sizes;
out vec4 pixel;
void main() {
  float away = length(gl_PointCoord - 0.5) * sizes.y;
  float alpha = colour.a * clamp(sizes.x + 0.5 - away, 0.0, 1.0);
  pixel = vec4(colour.rgb * alpha, alpha);
}`;

const RING = `#version 300 es
precision highp float;
uniform vec3 paper;
uniform float line;
flat in vec4 colour;
flat in vec2 sizes;
out vec4 pixel;
void main() {
  float away = abs(length(gl_PointCoord - 0.5) * sizes.y - sizes.x);
  vec2 widths = vec2(1.0, ${LINES.narrow / LINES.wide}) * line;
  vec2 alpha = ${LINES.opacity} * clamp(widths / 2.0 + 0.5 - away, 0.0, 1.0);
  alpha.x *= 1.0 - alpha.y;
  pixel = vec4(paper * alpha.x + colour.rgb * alpha.y, alpha.x + alpha.y);
}`;

const swatch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

/** Red, green and blue, 0 to 255, of any colour that CSS can name. */
export const rgb = (colour) => {
  swatch.fillStyle = colour;
  swatch.fillRect(0, 0, 1, 1);
  return [...swatch.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
};

const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;
const mix = ([low, high], share) => low + (high - low) * share;
const level = (share) => Math.round((1 - share) * LEVELS);

/** The programs and buffers of a WebGL2 context. */
class Shaders {
  constructor(gl) {
    this.gl = gl;
    this.largest = gl.getParameter(gl.ALIASED_POINT_SIZE_RANGE)[1];
    this.programs = [[vertex("0.0"), DISC], [vertex("line"), RING]].map((texts) => this.#link(texts));
    this.linked = this.programs.every((program) => gl.getProgramParameter(program, gl.LINK_STATUS));
    this.buffers = {};
    Object.entries({ xy: [2, gl.FLOAT], shares: [1, gl.FLOAT], paint: [4, gl.UNSIGNED_BYTE] }).forEach(([name, kind], slot) => {
      this.load(name, new Float32Array(0));
      gl.enableVertexAttribArray(slot);
      gl.vertexAttribPointer(slot, ...kind, true, 0, 0);
    });
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  load(name, values) {
    const gl = this.gl;
    const target = name === "indices" ? gl.ELEMENT_ARRAY_BUFFER : gl.ARRAY_BUFFER;
    gl.bindBuffer(target, (this.buffers[name] ??= gl.createBuffer()));
    gl.bufferData(target, values, gl.DYNAMIC_DRAW);
  }

  clear(width, height) {
    const gl = this.gl;
    if (gl.canvas.width !== width || gl.canvas.height !== height) [gl.canvas.width, gl.canvas.height] = [width, height];
    gl.disable(gl.SCISSOR_TEST);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.enable(gl.SCISSOR_TEST);
  }

  /** Draw ghosts, discs and rings on a part of the canvas. */
  draw([left, top, width, height], margin, layers, uniforms) {
    const gl = this.gl;
    const bottom = gl.canvas.height - top - height;
    gl.scissor(left, bottom, width, height);
    // A point is dropped with its centre, so the viewport has a margin.
    gl.viewport(left - margin, bottom - margin, width + 2 * margin, height + 2 * margin);
    layers.forEach((indices, layer) => {
      const program = this.programs[layer === 2 ? 1 : 0];
      gl.useProgram(program);
      for (const [name, value] of Object.entries({ ...uniforms, faint: Number(layer === 0) })) {
        const numbers = [value].flat();
        gl[`uniform${numbers.length}fv`](gl.getUniformLocation(program, name), numbers);
      }
      this.load("indices", indices);
      gl.drawElements(gl.POINTS, indices.length, gl.UNSIGNED_INT, 0);
    });
  }

  #link(texts) {
    const gl = this.gl;
    const program = gl.createProgram();
    [gl.VERTEX_SHADER, gl.FRAGMENT_SHADER].forEach((type, place) => {
      const shader = gl.createShader(type);
      gl.shaderSource(shader, texts[place]);
      gl.compileShader(shader);
      gl.attachShader(program, shader);
    });
    gl.linkProgram(program);
    return program;
  }
}

export class Points {
  /** What is looked at: the map moved by x and y, in its own unit, and `scale` times as large as if it were whole. */
  view = { x: 0, y: 0, scale: 1 };
  /** Size of the canvas on the page, in pixels, and how much smaller circles are on a small one: see `resize`. */
  width = 0;
  height = 0;
  shrink = 1;

  #canvas;
  #brush;
  #shaders = null;
  #waiting = 0;
  #stale = new Set();
  #order = new Uint32Array(0);
  #layers = [];
  #last = null;
  #middle = [0.5, 0.5];
  #extent = [1, 1];
  #all = {
    xy: new Float32Array(0),
    shares: new Float32Array(0),
    colours: new Uint8Array(0),
    mask: new Uint8Array(0),
    ringed: new Uint32Array(0),
    paper: [255, 255, 255],
    ghost: [185, 182, 174],
    radius: [1, 4],
    opacity: [0.9, 0.2],
  };

  constructor(canvas) {
    this.#canvas = canvas;
    this.#brush = canvas.getContext("2d");
    const gl = document.createElement("canvas").getContext("webgl2", { antialias: false, depth: false });
    const begin = (event) => {
      event?.preventDefault();
      const shaders = gl === null || gl.isContextLost() ? null : new Shaders(gl);
      this.#shaders = shaders?.linked ? shaders : null;
      this.set(this.#all);
      this.draw();
    };
    canvas.addEventListener("contextrestored", begin);
    gl?.canvas.addEventListener("webglcontextlost", begin);
    gl?.canvas.addEventListener("webglcontextrestored", begin);
    begin();
    this.resize();
  }

  /**
   * Any of these; the others stay as they are. `draw` shows them.
   *   xy        Float32Array(2n), x to the right, y down; at scale 1 all points just fit into the canvas
   *   shares    Float32Array(n) of uncertainty, 0 to 1 (not a number: 0): the larger, the larger and fainter the circle
   *   colours   Uint8Array(3n)
   *   mask      Uint8Array(n); 0 is a ghost: small, grey, faint, behind all others, and never picked
   *   ringed    Uint32Array(k), the points with a ring
   *   paper     [red, green, blue] below the rings; ghost: of the ghosts
   *   radius    [of share 0, of share 1], in pixels at scale 1; opacity: likewise, 0 to 1
   */
  set(parts) {
    const all = Object.assign(this.#all, parts);
    const n = all.xy.length / 2;
    for (const name of Object.keys(parts)) this.#stale.add(name);
    for (const [name, each, value] of [["shares", 1, 0], ["colours", 3, 128], ["mask", 1, 1]]) {
      if (all[name].length === each * n) continue;
      all[name] = new all[name].constructor(each * n).fill(value);
      this.#stale.add(name);
    }
    if ("shares" in parts) all.shares = all.shares.map((share) => (share > 0 ? Math.min(share, 1) : 0));
    if ("xy" in parts) this.#measure();
  }

  /** Take over the size that the canvas has on the page. */
  resize() {
    [this.width, this.height] = [this.#canvas.clientWidth, this.#canvas.clientHeight];
    this.shrink = Math.min(1, Math.max(0.5, Math.min(this.width, this.height) / 600));
    this.draw();
  }

  /** Draw in the next frame. */
  draw() {
    this.#waiting ||= requestAnimationFrame(() => this.#paint());
  }

  /** Move the map by pixels. */
  pan(dx, dy) {
    this.view.x += dx / this.#span;
    this.view.y += dy / this.#span;
    this.draw();
  }

  /** Enlarge the map by a factor; what is at the pixel stays there. Whatever the factor, at least the whole map is shown. */
  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const [x, y] = this.toMap(px, py);
    this.view.scale = Math.min(FARTHEST, Math.max(1, this.view.scale * factor));
    const [nowX, nowY] = this.toMap(px, py);
    this.view.x += nowX - x;
    this.view.y += nowY - y;
    if (this.view.scale === 1) [this.view.x, this.view.y] = [0, 0];
    this.draw();
  }

  /** The pixel of a place on the map. */
  project(x, y) {
    return [
      this.width / 2 + (x - this.#middle[0] + this.view.x) * this.#span,
      this.height / 2 + (y - this.#middle[1] + this.view.y) * this.#span,
    ];
  }

  toScreen(i) {
    return this.project(this.#all.xy[2 * i], this.#all.xy[2 * i + 1]);
  }

  toMap(px, py) {
    return [
      (px - this.width / 2) / this.#span + this.#middle[0] - this.view.x,
      (py - this.height / 2) / this.#span + this.#middle[1] - this.view.y,
    ];
  }

  /** Radius of a circle on the screen. */
  size(i) {
    return mix(this.#all.radius, this.#all.shares[i]) * this.#growth;
  }

  /** The point whose centre is nearest, among circles under the pixel or `reach` pixels away; -1 if there is none. */
  pick(px, py, reach = 0) {
    const { xy, shares, mask, radius } = this.#all;
    const [x, y] = this.toMap(px, py);
    const least = (radius[0] * this.#growth + reach) / this.#span;
    const more = ((radius[1] - radius[0]) * this.#growth) / this.#span;
    let best = -1;
    let nearest = Infinity;
    for (let i = 0; i < mask.length; i += 1) {
      const dx = xy[2 * i] - x;
      const dy = xy[2 * i + 1] - y;
      const away = dx * dx + dy * dy;
      if (away >= nearest || mask[i] === 0 || away >= (least + more * shares[i]) ** 2) continue;
      best = i;
      nearest = away;
    }
    return best;
  }

  /** 1 for every point in a polygon of places, [[x, y], ...], and 0 elsewhere; by the even-odd rule if it crosses itself. */
  inside(polygon) {
    const { xy, mask } = this.#all;
    const chosen = new Uint8Array(mask.length);
    const [xs, ys] = [0, 1].map((axis) => polygon.map((corner) => corner[axis]));
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    // A point is compared with the edges in its own horizontal band alone.
    const band = (y) => Math.min(BANDS - 1, Math.floor(((y - top) / (bottom - top)) * BANDS));
    const edges = Array.from({ length: BANDS }, () => []);
    polygon.forEach(([bx, by], place) => {
      const [ax, ay] = polygon.at(place - 1);
      if (ay === by) return;
      for (let at = band(Math.min(ay, by)); at <= band(Math.max(ay, by)); at += 1) edges[at].push(ax, ay, bx, by);
    });
    for (let i = 0; i < mask.length; i += 1) {
      const x = xy[2 * i];
      const y = xy[2 * i + 1];
      if (!(x >= left && x <= right && y >= top && y < bottom)) continue;
      const near = edges[band(y)];
      for (let k = 0; k < near.length; k += 4) {
        const ay = near[k + 1];
        const by = near[k + 3];
        if (ay > y !== by > y && x < near[k] + ((y - ay) / (by - ay)) * (near[k + 2] - near[k])) chosen[i] ^= 1;
      }
    }
    return chosen;
  }

  /** Pixels of the map's unit. */
  get #span() {
    return 0.92 * Math.min(this.width / this.#extent[0], this.height / this.#extent[1]) * this.view.scale;
  }

  /** Circles grow more slowly than the map, so that they part. */
  get #growth() {
    return this.shrink * Math.sqrt(this.view.scale);
  }

  #measure() {
    const xy = this.#all.xy;
    if (xy.length === 0) return;
    const [low, high] = [[Infinity, Infinity], [-Infinity, -Infinity]];
    for (let k = 0; k < xy.length; k += 1) {
      if (xy[k] < low[k & 1]) low[k & 1] = xy[k];
      if (xy[k] > high[k & 1]) high[k & 1] = xy[k];
    }
    this.#middle = low.map((least, axis) => (least + high[axis]) / 2);
    const extent = low.map((least, axis) => high[axis] - least);
    this.#extent = extent.map((side) => Math.max(side, 0.01 * (Math.max(...extent) || 1)));
  }

  /** The uncertain ones first, so that the certain ones stay visible on top of them. */
  #sort() {
    const shares = this.#all.shares;
    const starts = new Uint32Array(LEVELS + 2);
    for (let i = 0; i < shares.length; i += 1) starts[level(shares[i]) + 1] += 1;
    for (let k = 1; k < starts.length; k += 1) starts[k] += starts[k - 1];
    this.#order = new Uint32Array(shares.length);
    for (let i = 0; i < shares.length; i += 1) {
      const place = level(shares[i]);
      this.#order[starts[place]] = i;
      starts[place] += 1;
    }
  }

  /** Ghosts, above them the others, and above those the rings. */
  #arrange() {
    const { xy, mask, ringed } = this.#all;
    const order = this.#order;
    const sorted = new Uint32Array(order.length);
    let ghosts = 0;
    for (let i = 0; i < mask.length; i += 1) if (mask[i] === 0) ghosts += 1;
    let [back, front] = [0, ghosts];
    for (let k = 0; k < order.length; k += 1) {
      if (mask[order[k]] === 0) sorted[back++] = order[k];
      else sorted[front++] = order[k];
    }
    const rings = ringed.filter((i) => mask[i] !== 0);
    this.#layers = [sorted.subarray(0, ghosts), sorted.subarray(ghosts), rings].map((indices) => {
      // A copy in this order is read from one end to the other, many times faster than here and there.
      const places = new Float32Array(2 * indices.length);
      for (let k = 0; k < indices.length; k += 1) {
        places[2 * k] = xy[2 * indices[k]];
        places[2 * k + 1] = xy[2 * indices[k] + 1];
      }
      return { indices, places, near: new Uint32Array(indices.length) };
    });
  }

  /** Sort what has changed since the last frame, and hand it to WebGL2. */
  #refresh() {
    const { xy, shares, colours } = this.#all;
    const changed = (...names) => names.some((name) => this.#stale.has(name));
    if (changed("shares")) this.#sort();
    if (changed("xy", "shares", "mask", "ringed")) this.#arrange();
    if (changed("xy")) this.#shaders?.load("xy", xy);
    if (changed("shares")) this.#shaders?.load("shares", shares);
    if (changed("colours")) {
      // Graphics cards read four bytes at a time.
      const paint = new Uint8Array((colours.length / 3) * 4);
      for (let k = 0; k < colours.length; k += 1) paint[k + Math.floor(k / 3)] = colours[k];
      this.#shaders?.load("paint", paint);
    }
    this.#stale.clear();
    this.#last = null;
  }

  #paint() {
    this.#waiting = 0;
    const dense = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * dense), Math.round(this.height * dense)];
    if (width === 0 || height === 0) return;
    if (this.#canvas.width !== width || this.#canvas.height !== height) {
      [this.#canvas.width, this.#canvas.height] = [width, height];
      this.#last = null;
    }
    if (this.#stale.size > 0) this.#refresh();
    const widest = dense * (2 * Math.max(...this.#all.radius) * this.#growth + LINES.wide) + 1;
    const [margin, shaders] = [Math.ceil(widest / 2), widest <= this.#shaders?.largest ? this.#shaders : null];
    const strips = this.#shift(width, height, dense);
    this.#last = { ...this.view };
    let copies = false;
    for (const part of strips ?? [[0, 0, width, height]]) {
      const layers = this.#within(part, margin, dense);
      const count = layers.reduce((sum, layer) => sum + layer.length, 0);
      // Without a graphics card, to copy the whole canvas takes longer than to draw a few circles here.
      if (shaders === null || (strips !== null && count <= FEW)) {
        this.#paintHere(part, layers, dense);
        continue;
      }
      if (!copies) shaders.clear(width, height);
      copies = true;
      shaders.draw(part, margin, layers, this.#uniforms(part, margin, dense));
    }
    if (copies) this.#brush.drawImage(shaders.gl.canvas, 0, 0);
  }

  /**
   * Move the last picture along with the map, and return the parts that it does not cover, as [left, top, width, height];
   * null if it is of no use.
   */
  #shift(width, height, dense) {
    const { x, y, scale } = this.#last ?? {};
    const [dx, dy] = [this.view.x - x, this.view.y - y].map((far) => far * this.#span * dense);
    const [right, down] = [Math.round(dx), Math.round(dy)];
    const covers = scale === this.view.scale && Math.abs(right) < width && Math.abs(down) < height;
    // Between two pixels, the picture would be blurred.
    if (!covers || Math.hypot(dx - right, dy - down) > 0.01) {
      this.#brush.clearRect(0, 0, width, height);
      return null;
    }
    this.#brush.globalCompositeOperation = "copy";
    this.#brush.drawImage(this.#canvas, right, down);
    this.#brush.globalCompositeOperation = "source-over";
    const beside = [right > 0 ? 0 : width + right, 0, Math.abs(right), height];
    const above = [Math.max(right, 0), down > 0 ? 0 : height + down, width - Math.abs(right), Math.abs(down)];
    return [beside, above].filter((part) => part[2] > 0 && part[3] > 0);
  }

  /** Of each layer, the points whose circles may reach into a part of the canvas. */
  #within([left, top, width, height], margin, dense) {
    const [x0, y0] = this.toMap((left - margin) / dense, (top - margin) / dense);
    const [x1, y1] = this.toMap((left + width + margin) / dense, (top + height + margin) / dense);
    return this.#layers.map(({ indices, places, near }) => {
      let count = 0;
      for (let k = 0; k < indices.length; k += 1) {
        const x = places[2 * k];
        const y = places[2 * k + 1];
        if (x < x0 || x > x1 || y < y0 || y > y1) continue;
        near[count] = indices[k];
        count += 1;
      }
      return near.subarray(0, count);
    });
  }

  #uniforms([left, top, width, height], margin, dense) {
    const { radius, opacity, ghost, paper } = this.#all;
    return {
      centre: this.toMap((left + width / 2) / dense, (top + height / 2) / dense),
      corner: [width / 2 + margin, -(height / 2 + margin)],
      span: this.#span * dense,
      radius: radius.map((one) => one * this.#growth * dense),
      faintRadius: radius[0] * this.shrink * dense,
      line: LINES.wide * dense,
      opacity,
      ghost: ghost.map((one) => one / 255),
      paper: paper.map((one) => one / 255),
    };
  }

  #paintHere(part, [ghosts, discs, rings], dense) {
    const { colours, shares, opacity, radius, ghost, paper } = this.#all;
    const brush = this.#brush;
    const own = (i) => css(colours.subarray(3 * i, 3 * i + 3));
    const circle = (i, r) => {
      brush.beginPath();
      brush.arc(...this.toScreen(i), r, 0, 2 * Math.PI);
    };
    const disc = (i, r, shade, alpha) => {
      Object.assign(brush, { globalAlpha: alpha, fillStyle: shade });
      circle(i, r);
      brush.fill();
    };
    brush.save();
    brush.beginPath();
    brush.rect(...part);
    brush.clip();
    brush.scale(dense, dense);
    for (const i of ghosts) disc(i, radius[0] * this.shrink, css(ghost), FAINT);
    for (const i of discs) disc(i, this.size(i), own(i), mix(opacity, shares[i]));
    for (const i of rings) {
      circle(i, this.size(i));
      for (const [wide, shade] of [[LINES.wide, css(paper)], [LINES.narrow, own(i)]]) {
        Object.assign(brush, { globalAlpha: LINES.opacity, lineWidth: wide, strokeStyle: shade });
        brush.stroke();
      }
    }
    brush.restore();
  }
}
