// Images of the next message: picked, dropped or pasted, and scaled down before they are sent.

const LONGEST_SIDE = 2048; // pixels
const LARGEST_PNG = 2 ** 20; // characters of a data: URL; above it, and for photos, an image becomes JPEG
const READABLE = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** Return an image file as a data: URL, without its metadata. */
async function shrunk(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // the server, too, places transparent images on white
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  const png = file.type === "image/jpeg" ? null : canvas.toDataURL("image/png");
  return png && png.length <= LARGEST_PNG ? png : canvas.toDataURL("image/jpeg", 0.9);
}

/** Return a turn as a message of the API. */
function message({ role, content, images }) {
  if (!images?.length) return { role, content };
  const texts = content ? [{ type: "text", text: content }] : [];
  return { role, content: [...texts, ...images.map((url) => ({ type: "image_url", image_url: { url } }))] };
}

/** Return the nodes that show a turn's images. */
function shown({ images, unstored }) {
  const nodes = (images ?? []).map((url, i) => element("img", { src: url, alt: `Image ${i + 1}` }));
  if (unstored) nodes.push(element("p", {}, `${unstored} ${unstored === 1 ? "image was" : "images were"} too large to store.`));
  return nodes;
}

const images = {
  urls: [],
  ready: Promise.resolve(), // fulfilled once all chosen files are read
  models: new Set(), // names of the models that take images

  start() {
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", () => {
      this.add([...$("files").files]);
      $("files").value = ""; // so that the same file can be chosen again
    });
    $("question").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    $("chat").addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    $("chat").addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    for (const id of ["mode", "name"]) $(id).addEventListener("change", () => this.offer());
  },

  /** Return why images cannot be sent, or "". */
  refusal() {
    if (!$("name").value) return "The model is not known yet, so images cannot be sent.";
    if (!this.models.has($("name").value)) return "This model takes text only, so images cannot be sent.";
    return $("mode").value === "completion" ? "Completions take text only, so images cannot be sent." : "";
  },

  /** Show the button if the model takes images. */
  offer() {
    $("attach").hidden = this.refusal() !== "";
  },

  add(files) {
    if (this.refusal()) return ($("invalid").textContent = this.refusal());
    $("invalid").textContent = "";
    this.ready = this.ready.then(async () => {
      for (const file of files) {
        const url = READABLE.includes(file.type) && (await shrunk(file).catch(() => null));
        if (url) this.set([...this.urls, url]);
        else $("invalid").textContent = `${file.name} is not a PNG, JPEG, WebP, GIF or BMP image that this browser can read.`;
      }
      $("question").focus();
    });
  },

  /** Replace the images of the next message. */
  set(urls) {
    this.urls = urls;
    $("images").hidden = !urls.length;
    $("images").replaceChildren(
      ...urls.map((url, i) => {
        const remove = element("button", { type: "button", className: "quiet", "aria-label": `Remove image ${i + 1}` }, "×");
        remove.addEventListener("click", () => {
          this.set(this.urls.filter((_, j) => j !== i));
          $("question").focus();
        });
        return element("li", {}, element("img", { src: url, alt: `Image ${i + 1}` }), remove);
      }),
    );
  },

  /** Return the images of the next message, which then has none. */
  take() {
    const urls = this.urls;
    this.set([]);
    return urls;
  },
};
